"""Operators in terms of others: the values of PyTorch's own, of 16 bits rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.tracing.decompositions import decompositions
from epigemm.epilogues.tracing.steps import KEPT

aten: Any = torch.ops.aten
CASES: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "mish": (aten.mish.default, F.mish),
    "hardsigmoid": (aten.hardsigmoid.default, F.hardsigmoid),
    "hardswish": (aten.hardswish.default, F.hardswish),
    "celu": (aten.celu.default, F.celu),
    "celu of 0.7": (aten.celu.default, lambda x: F.celu(x, 0.7)),
    "lerp of 0.3": (aten.lerp.Scalar, lambda x: torch.lerp(x, -x, 0.3)),
    "lerp of 0.9": (aten.lerp.Scalar, lambda x: torch.lerp(x, -x, 0.9)),
}
MORE: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "celu of 0.7": lambda x: (0.7,),
    "lerp of 0.3": lambda x: (-x, 0.3),
    "lerp of 0.9": lambda x: (-x, 0.9),
}


def nothing(x: Tensor) -> tuple[Any, ...]:
    return ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    overload, function = CASES[name]
    x = torch.linspace(-6, 6, 97, dtype=torch.float64).to(dtype)
    found = decompositions()[overload](x, *MORE.get(name, nothing)(x))
    expected = function(x)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps
    bound = 8 * unit if dtype.itemsize > 2 else unit  # rounded once: a tie may fall to either side
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * 1e-2)
    if dtype.itemsize == 2:
        assert float((found == expected).double().mean()) > 0.95


def test_what_a_functor_has_is_not_taken_apart() -> None:
    names = {overload._schema.name.split("::")[-1] for overload in decompositions()}
    ours = {overload._schema.name.split("::")[-1] for overload, _ in CASES.values()}
    filled = {"scalar_tensor", "full", "full_like"}
    assert not (names & set(KEPT)) - ours - filled


def test_what_is_filled_with_a_plain_number_is_left_alone() -> None:
    like = torch.zeros(2, 3)
    found = decompositions()[aten.full_like.default](like, 0.5)
    assert found is NotImplemented or torch.equal(found, torch.full_like(like, 0.5))
