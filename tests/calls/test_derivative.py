"""Derivatives of epilogues that are made at run time: a kernel on a GPU, none elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import derivative
from epigemm.epilogues.registry import typed


@epigemm.epilogue
def gated(acc: Tensor, gate: epigemm.Matrix, scale: epigemm.PerColumn) -> Tensor:
    return torch.tanh(acc) * gate * scale


def call_on(device: torch.device) -> tuple[ElementwiseCall, Tensor]:
    x, gate, grad = (torch.randn(40, 24, device=device) for _ in range(3))
    operands = [gate, torch.randn(24, device=device)]
    return ElementwiseCall(typed(gated.traced, [False, False]), x, operands), grad


@pytest.mark.gpu
def test_only_what_is_needed_is_computed() -> None:
    call, grad = call_on(torch.device("cuda"))
    leaves = [each.detach().requires_grad_() for each in call.inputs]
    expected = torch.autograd.grad(torch.tanh(leaves[0]) * leaves[1] * leaves[2], leaves, grad)
    found = derivative.gradients(call, grad, (True,) * 3)
    assert found is not None
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    of_x_alone = derivative.gradients(call, grad, (True, False, False))
    assert of_x_alone is not None and of_x_alone[1:] == [None, None]
    torch.testing.assert_close(of_x_alone[0], found[0], rtol=0, atol=0)


@epigemm.epilogue
def gated_rows(acc: Tensor, gate: epigemm.Matrix, scale: epigemm.PerColumn, row: epigemm.PerRow) -> Tensor:
    return torch.tanh(acc) * gate * scale + row


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("begins", [0, 1], ids=["aligned", "one element in"])
@pytest.mark.parametrize(
    ("m", "n"), [(1, 9), (3, 7), (64, 8), (65, 9), (100, 33), (513, 127), (77, 1001), (2, 100_003)], ids=str
)
@pytest.mark.parametrize("has_row", [False, True], ids=["by column", "by row and column"])
def test_rows_of_any_length(m: int, n: int, dtype: torch.dtype, begins: int, *, has_row: bool) -> None:
    """Without per-row operands rows that do not begin at whole vectors are taken as one row."""

    def drawn(*sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        return torch.randn(begins + count, device="cuda").to(dtype)[begins:].view(sizes)

    given = [drawn(m, n), drawn(m, n), drawn(n), *([drawn(m)] if has_row else [])]
    leaves = [each.detach().double().clone().requires_grad_() for each in given]
    expected = torch.tanh(leaves[0]) * leaves[1] * leaves[2] + (leaves[3].unsqueeze(1) if has_row else 0)
    function = gated_rows if has_row else gated
    step = torch.finfo(dtype).eps
    out = drawn(m, n).fill_(float("nan"))
    function.elementwise(*given, out=out)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=4 * step, atol=4 * step)
    grad = drawn(m, n)
    operands = [*given[1:3], *(row.unsqueeze(1) for row in given[3:])]
    call = ElementwiseCall(typed(function.traced, [False] * len(operands)), given[0], operands)
    found = derivative.gradients(call, grad, (True,) * len(given))
    wanted = torch.autograd.grad(expected, leaves[:2], grad.double())
    assert found is not None
    for mine, other in zip(found[:2], wanted, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.double(), other, rtol=8 * step, atol=8 * step)
