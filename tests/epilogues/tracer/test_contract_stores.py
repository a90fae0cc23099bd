"""The C++ text of a second value for each element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import Matrix, PerColumn


def test_a_second_value_has_functions_of_its_own() -> None:
    """Each value by the functions that its own errors allow, and both read the operands of either."""

    def wave(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return torch.sin(acc + bias)

    def gelu(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return F.gelu(acc) + other

    plain, of_wave = trace(gelu), trace(wave)
    both = Traced("both", plain.operands, plain.program, stored=of_wave.program)
    assert both.source.count("struct ") == 2 and both.digest != plain.digest
    for part in ("apply", "apply_float16", "apply_bfloat16"):
        text = both.kernel_source([1, 1], ("operand", part))
        functions = text[text.rindex("epigemm_operand") :]
        assert functions.count("return 1;") == 2
        assert "epigemm_has_store() {\n  return true;" in functions
        assert functions.count("StoredFunctor::apply(") == (1 if part == "apply" else 2)
        assert ("epigemm_has_far_store() {\n  return true;" in functions) == (part != "apply")
        without = plain.kernel_source([1, 1], ("operand", part))
        assert "epigemm_has_store() {\n  return false;" in without and "StoredFunctor" not in without
    text = both.kernel_source([1, 1], ("operand", "slope"))
    assert "epigemm_store" not in text[text.rindex("epigemm_operand") :]
