"""Models that are fused without a compiler: seconds faster to start, with eager's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import epigemm
from epigemm.fusion import FusionReport


def fuse_eagerly(model: Any, **settings: Any) -> Any:
    """`epigemm.fuse`, whose graphs run operator by operator."""
    return epigemm.fuse(model, options={"backend": "eager"}, **settings)


def compile_eagerly(model: nn.Module) -> Any:
    """What torch.compile makes of a call of a model, without epigemm."""
    return torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="eager")


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """Dynamo's, of a function of one result, which is not computed."""
    found: list[fx.Graph] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(graph_module.graph)
        return lambda *_: (torch.empty(0),)

    compiled: Any = torch.compile(function, backend=backend, fullgraph=True)
    compiled(*inputs)
    return found[0]


def report_of(fused: nn.Module) -> FusionReport:
    report: Any = fused.fusion_report
    assert isinstance(report, FusionReport)
    return report


def assert_all_fused(fused: nn.Module) -> None:
    """That every product in a model's graphs is a fused call."""
    report = report_of(fused)
    assert report.sites and not report.skipped, report
