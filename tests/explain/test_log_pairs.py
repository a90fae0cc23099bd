"""Pairs of products in explanations: one kernel, or two calls, as they run."""

from __future__ import annotations

import pytest
import torch

import epigemm
from epigemm.calls import resolve
from epigemm.planner import plans
from tests.explain.test_listener import Calls
from tests.gemm.query import H200

M, N, K = 4096, 2048, 1024


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)


@pytest.mark.parametrize("lead", [(M,), (2, M // 2)], ids=str)
def test_explained_as_one_kernel(lead: tuple[int, ...]) -> None:
    x, weight = (torch.empty(*each, K, dtype=torch.bfloat16) for each in (lead, (2 * N,)))
    found = epigemm.explain("linear_glu", x, weight, torch.empty(2 * N, dtype=torch.bfloat16))
    assert found.path == "fused" and "gated_silu_bias2" in found.kernel and len(found.kernels) == 1
    assert "two calls" in "".join(found.reasons) and found.us is not None
    few = epigemm.explain("linear_glu", x[..., :8, :], weight)
    assert any("reads another product" in reason for reason in few.reasons)
    recorded = epigemm.explain("linear_glu", x, weight.requires_grad_())
    assert len(recorded.kernels) > 1


def test_a_layers_products_are_one_in_an_explanation_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has run, and each one where it has not; a call that is recorded before changes neither."""
    gelu, glu = (kind(K, N, dtype=torch.bfloat16) for kind in (epigemm.nn.LinearGELU, epigemm.nn.LinearGLU))
    model = Calls(lambda x: (gelu(x), glu.requires_grad_(False)(x)))
    x = torch.zeros(4096, K, dtype=torch.bfloat16)
    assert [each.function for each in epigemm.explain(model, x)] == ["bias_gelu", "linear", "gated_silu"]
    monkeypatch.setattr(resolve._Linear, "run", lambda self: self.call.new_out().zero_())
    found = [(each.runs, "gradients are recorded" in str(each)) for each in epigemm.explain(model, x)]
    assert found == [("fallback", True), ("fused kernel", False)]


def test_products_inside_a_transform_have_no_memory_to_share() -> None:
    class Within(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Parameter(torch.randn(8, 16)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def gated(given: torch.Tensor) -> torch.Tensor:
                gate = epigemm.linear(given, self.second)
                return epigemm.linear_gated(given, self.first, None, gate)

            derivative: torch.Tensor = torch.func.jvp(gated, (x,), (x,))[1]
            return derivative

    found = epigemm.explain(Within(), torch.randn(4, 16))
    assert len(found.products) == 2
