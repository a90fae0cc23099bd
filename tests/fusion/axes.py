"""A model of one layer whose forward sees its result by other axes, and what it gives with and without fusion."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from tests.fusion.eager import fuse_eagerly

B, S, C = 3, 6, 6  # square: an axis that is taken for another one gives other numbers, and no error


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(S, S), nn.BatchNorm1d(S)
        self.gain, self.column = nn.Parameter(torch.rand(C) + 0.5), nn.Parameter(torch.rand(S, 1) + 0.5)
        self.grid = nn.Parameter(torch.rand(S, C))
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None and var is not None
        nn.init.normal_(mean)
        nn.init.uniform_(var, 0.5, 2.0)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        raise NotImplementedError


def outcome(called: Any, model: nn.Module, learns: bool, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """What two calls give, with gradients; and what the results are."""
    found: list[Any] = []
    kinds: list[Any] = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(B, S, C, generator=generator).to(dtype).requires_grad_(learns) for _ in "xy"]
        with torch.set_grad_enabled(learns):
            results = called(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        found += [each.detach().clone() for each in results]
        kinds += [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in results]
        kinds.append([one.data_ptr() == other.data_ptr() for one in results for other in results])
        if learns:
            weights = [torch.randn(each.shape, generator=generator).to(dtype) for each in results]
            given = [*leaves, *model.parameters()]
            learning = [(r, w) for r, w in zip(results, weights, strict=True) if r.requires_grad]
            total = sum((r.double() * w).sum() for r, w in learning)
            assert isinstance(total, Tensor)
            found += torch.autograd.grad(total, given, allow_unused=True)
    return found, kinds


def fused(model: nn.Module, road: str) -> tuple[Any, epigemm.FusionReport]:
    """The model fused in place by `fuse`, or compiled by the backend; and the report."""
    if road == "fuse":
        called: Any = fuse_eagerly(model, inplace=True)
        return called, called.fusion_report
    report = epigemm.FusionReport()
    options: dict[str, Any] = {"backend": "aot_eager", "report": report.add}
    return torch.compile(model, backend="epigemm", options=options), report


def compare(
    forward: Any, road: str, learns: bool, dtype: torch.dtype = torch.float32
) -> epigemm.FusionReport:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = type("Model", (Base,), {"forward": forward})().eval().to(dtype)
    model = copy.deepcopy(plain)
    called, report = fused(model, road)
    expected, kinds = outcome(plain, plain, learns, dtype)
    actual, others = outcome(called, model, learns, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert others == kinds if road == "fuse" else others[:1] == kinds[:1]
    return report
