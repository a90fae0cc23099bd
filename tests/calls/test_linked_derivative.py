"""Derivatives of epilogues that are made at run time: a kernel on a GPU, none elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import linked_derivative


@epigemm.epilogue
def gated(acc: Tensor, gate: epigemm.Matrix, scale: epigemm.PerColumn) -> Tensor:
    return torch.tanh(acc) * gate * scale


def call_on(device: torch.device) -> tuple[ElementwiseCall, Tensor]:
    x, gate, grad = (torch.randn(40, 24, device=device) for _ in range(3))
    operands = [gate, torch.randn(24, device=device)]
    return ElementwiseCall(gated.linked([False, False]), x, None, operands), grad


def test_on_a_cpu_there_is_no_kernel() -> None:
    call, grad = call_on(torch.device("cpu"))
    assert linked_derivative.gradients(call.epilogue, call, grad, (True,) * 4) is None  # type: ignore[arg-type]


@pytest.mark.gpu
def test_only_what_is_needed_is_computed() -> None:
    call, grad = call_on(torch.device("cuda"))
    leaves = [each.detach().requires_grad_() for each in (call.x, *call.operands)]
    expected = torch.autograd.grad(torch.tanh(leaves[0]) * leaves[1] * leaves[2], leaves, grad)
    found = linked_derivative.gradients(call.epilogue, call, grad, (True,) * 4)  # type: ignore[arg-type]
    assert found is not None and found[1] is None
    for mine, other in zip((found[0], *found[2:]), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    (of_x, *others) = linked_derivative.gradients(  # type: ignore[misc]
        call.epilogue,  # type: ignore[arg-type]
        call,
        grad,
        (True, False, False, False),
    )
    torch.testing.assert_close(of_x, found[0], rtol=0, atol=0)
    assert others == [None, None, None]
