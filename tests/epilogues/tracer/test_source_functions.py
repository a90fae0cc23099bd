"""The functions that kernels call, by a functor: which forms they have. csrc/test_functors has their values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import Matrix, PerColumn
from epigemm.epilogues.tracer.source import is_long
from tests.csrc.test_functors import lengthy


def text_of(of: Traced, part: str) -> str:
    text = of.kernel_source([1] * len(of.operands), ("operand", part))
    return text[text.index("struct Functor") :]


def test_what_is_long() -> None:
    """By the instructions of the arithmetic that runs: a result of 16 bits has shorter functions."""
    mish, of_many = trace(lambda acc: F.mish(acc)), trace(lengthy)
    assert is_long(mish.program, mish.kinds, "apply") and is_long(of_many.program, of_many.kinds, "apply")
    assert not is_long(mish.program, mish.kinds, "apply_bfloat16")


def test_a_second_value_has_functions_of_its_own() -> None:
    """Each value by the functions that its own errors allow, and both read the operands of either."""

    def wave(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return torch.sin(acc + bias)

    def gelu(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return F.gelu(acc) + other

    plain, of_wave = trace(gelu), trace(wave)
    both = Traced("both", plain.operands, plain.program, stored=of_wave.program)
    assert both.source.count("struct ") == 2 and both.digest != plain.digest
    for part, number in (("apply", "float, false"), ("apply_float16", "epigemm::Rounded, true")):
        text = text_of(both, part)
        assert text.count("return 1;") == 2
        assert f"using stored = epigemm::open::Applied<StoredFunctor, {number}, 0, 10>;" in text
        assert "using stored = epigemm::open::Nothing;" in text_of(plain, part)
    assert "stored" not in text_of(both, "slope")
