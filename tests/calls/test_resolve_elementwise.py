"""Elementwise calls: all layouts, in place, and without a kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import entry, resolve_elementwise
from epigemm.epilogues.registry import EPILOGUES, typed
from epigemm.planner.reasons import Reason

BIAS_RELU = EPILOGUES["bias_relu"]


@epigemm.epilogue
def gated(acc: Tensor, gate: epigemm.Matrix, scale: epigemm.PerColumn) -> Tensor:
    return torch.tanh(acc) * gate + scale


def lying(x: Tensor) -> dict[str, Tensor]:
    return {
        "rows": x,
        "columns": x.t().contiguous().t(),
        "gaps": torch.cat((x, x), 1)[:, : x.shape[1]],
        "batches": x.view(2, 3, -1).transpose(0, 1),
    }


@pytest.mark.parametrize("layout", ["rows", "columns", "gaps", "batches"])
def test_any_layout(layout: str) -> None:
    x, bias = lying(torch.randn(6, 16))[layout], torch.randn(32)[::2]
    found = resolve_elementwise.elementwise(ElementwiseCall(BIAS_RELU, x, (bias,)))
    torch.testing.assert_close(found, torch.relu(x + bias))
    assert found.stride() == torch.empty_like(x).stride()
    out = torch.empty_like(x)
    assert resolve_elementwise.elementwise(ElementwiseCall(BIAS_RELU, x, (bias,), out=out)) is out
    torch.testing.assert_close(out, found, rtol=0, atol=0)
    in_place = x.clone(memory_format=torch.preserve_format)
    assert (
        resolve_elementwise.elementwise(ElementwiseCall(BIAS_RELU, in_place, (bias,), out=in_place))
        is in_place
    )
    torch.testing.assert_close(in_place, found, rtol=0, atol=0)


def test_where_no_kernel_is_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, bias = torch.randn(6, 16), torch.randn(16)
    monkeypatch.setattr(entry, "call_elementwise", lambda *call: Reason.NOT_READY)
    found = resolve_elementwise.elementwise(ElementwiseCall(BIAS_RELU, x, (bias,)))
    torch.testing.assert_close(found, torch.relu(x + bias), rtol=0, atol=0)


def test_an_epilogue_that_is_made_at_run_time() -> None:
    x, gate, scale = torch.randn(6, 16), torch.randn(16, 6).t(), torch.randn(16)
    call = ElementwiseCall(typed(gated.traced, [False, False]), x, [gate, scale])
    torch.testing.assert_close(resolve_elementwise.elementwise(call), torch.tanh(x) * gate + scale)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(6, 16)
    with pytest.raises(RuntimeError, match="bias: got shape"):
        resolve_elementwise.elementwise(ElementwiseCall(BIAS_RELU, x, (torch.randn(15),)))
    memory = torch.randn(7, 16)
    with pytest.raises(RuntimeError, match="out: some of its elements share memory with x"):
        resolve_elementwise.elementwise(ElementwiseCall(BIAS_RELU, memory[1:], out=memory[:-1]))
