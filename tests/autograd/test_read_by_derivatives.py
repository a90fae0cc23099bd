"""Recorded calls have derivatives where PyTorch's operators have. What they save: ops/test_saved_tensors.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import UserEpilogue
from tests.net.explanations import Calls
from tests.support.formulas import formula
from tests.support.primitives import FUNCTIONS, traced_of
from tests.support.untyped import backward


def fused(epilogue: UserEpilogue, road: str) -> Callable[..., Tensor]:
    """The function behind a product, in one of the ways that autograd records it."""

    def plain(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        function: Any = epilogue
        result: Tensor = function.__wrapped__(F.linear(x, weight), *operands)
        return result

    if road == "PyTorch":
        return plain
    torch._dynamo.reset()
    if road == "fuse":
        return epigemm.fuse(Calls(plain), strict=True, options={"backend": "eager"})
    return torch.compile(epilogue, backend="aot_eager", fullgraph=True) if road == "compiled" else epilogue


def shapes_of(epilogue: UserEpilogue) -> list[tuple[int, ...]]:
    return [(7, 8), (5, 8), *[(5,) if kind == "per_column" else (7, 5) for kind in epilogue.traced.kinds]]


QUOTIENTS = [
    "acc // r + acc",
    "torch.div(acc, r, rounding_mode='floor') + torch.div(acc, 3.0, rounding_mode='trunc')",
    "acc + torch.heaviside(r, r)",
]


@pytest.mark.parametrize("road", ["call", "fuse", "compiled"])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("value", QUOTIENTS)
def test_without_derivatives(value: str, needs: tuple[bool, ...], road: str) -> None:
    epilogue: Any = epigemm.epilogue(formula(f"acc, r: Matrix -> {value}"))
    expected = outcome(fused(epilogue, "PyTorch"), shapes_of(epilogue), needs)
    if road == "compiled" and isinstance(expected, str):  # the backward pass is traced in the first call
        with pytest.raises(RuntimeError, match=expected.split(" is ")[0]):
            outcome(fused(epilogue, road), shapes_of(epilogue), needs)
    else:
        assert outcome(fused(epilogue, road), shapes_of(epilogue), needs) == expected


def outcome(function: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], needs: Sequence[bool]) -> Any:
    """Of each argument whether its gradient is None, zero or other; or the error of the backward pass."""
    rng = torch.Generator().manual_seed(0)
    leaves = [torch.rand(shape, generator=rng) + 0.25 for shape in shapes]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    result = function(*leaves)
    if not result.requires_grad:
        return "not recorded"
    try:
        backward(result.sum())
    except RuntimeError as error:
        return str(error)
    return [None if leaf.grad is None else bool(leaf.grad.any()) for leaf in leaves]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_primitive_has_the_derivative_of_pytorch(name: str) -> None:
    """A gradient, zeros, none, or an error."""
    function, arity, _ = FUNCTIONS[name]
    epilogue, shapes = UserEpilogue(traced_of(name)), [(4, 8), (5, 8), *[(5,)] * (arity - 1)]

    def plain(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        result: Tensor = function(F.linear(x, weight), *operands).to(x.dtype)
        return result

    for needs in (
        [True] * len(shapes),
        [True, True, False][: len(shapes)],
        [False, False, True][: len(shapes)],
    ):
        assert outcome(epilogue, shapes, needs) == outcome(plain, shapes, needs)
