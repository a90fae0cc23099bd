"""Epilogues that are made at run time, on CPUs: results are new tensors, and errors name the function's operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow
from tests.support.untyped import torch as untyped
from tests.support.watching import BUILT_IN

pytestmark = BUILT_IN
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _draw(rng: torch.Generator, dtype: torch.dtype, lead: tuple[int, ...] = (5,)) -> list[Tensor]:
    """x, weight, bias, row, other."""
    shapes = ((*lead, 8), (16, 8), (16,), lead, (*lead, 16))
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


@epigemm.epilogue
def itself(acc: Tensor) -> Tensor:
    return acc


@epigemm.epilogue
def detached(acc: Tensor) -> Tensor:
    return acc.detach()


@epigemm.epilogue
def an_operand(acc: Tensor, other: Matrix) -> Tensor:
    return other


@epigemm.epilogue
def of_vectors(acc: Tensor, bias: PerColumn, row: PerRow) -> Tensor:
    result: Tensor = torch.sigmoid(bias) * row
    return result


@epigemm.epilogue
def rounded(acc: Tensor) -> Tensor:
    return acc.half().float()


@epigemm.epilogue
def a_constant(acc: Tensor) -> Tensor:
    return torch.full_like(acc, 2.0)


RETURNS = {"other": an_operand, "bias row": of_vectors} | {
    f"nothing: {each.traced.name}": each for each in (itself, detached, rounded, a_constant)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", RETURNS)
def test_results_are_new_tensors(names: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Whatever the function returns: written to, they change no operand."""
    function = RETURNS[names]
    x, weight, bias, row, other = _draw(rng, dtype)
    named = {"bias": bias, "row": row, "other": other}
    operands = [named[name] for name in names.split() if name in named]
    z = other + 1
    for call, inputs in ((function, (x, weight)), (function.elementwise, (z,))):
        kept = [tensor.clone() for tensor in (*inputs, *operands)]
        result: Any = call(*inputs, *operands)
        assert result.is_contiguous()
        result.fill_(7.0)
        assert all(torch.equal(a, b) for a, b in zip((*inputs, *operands), kept, strict=True))


@epigemm.epilogue
def relu_of_sum(acc: Tensor, shift: PerColumn) -> Tensor:
    return torch.relu(acc + shift)


@pytest.mark.parametrize("shift", [torch.ones(5), torch.ones(6).int(), "text"], ids=str)
def test_errors_name_an_operand_as_its_function_does(shift: Any) -> None:
    """Also where the package has the function's kernels, under another name."""
    x, weight = torch.ones(4, 8), torch.ones(6, 8)
    calls: Any = (relu_of_sum, (x, weight, shift)), (relu_of_sum.elementwise, (x[:, :6], shift))
    for call, given in calls:
        with pytest.raises((RuntimeError, TypeError), match="shift: got "):
            call(*given)


@pytest.mark.parametrize("shift", [torch.ones(6).bfloat16(), 3.0], ids=str)
def test_errors_of_compiled_calls_name_an_operand_as_its_function_does(shift: Any) -> None:
    def call(x: Tensor) -> Tensor:
        return relu_of_sum(x, torch.ones(6, 8), shift)

    with pytest.raises(Exception, match="shift: got "):
        untyped.compile(call, backend="aot_eager", fullgraph=True)(torch.ones(4, 8))
