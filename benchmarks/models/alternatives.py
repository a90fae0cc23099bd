"""The ways to call a model: as it is, fused, compiled, captured."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from benchmarks.harness.records import EAGER
from benchmarks.models.records import (
    BACKEND,
    COMPILED,
    FUSED,
    FUSED_GRAPH,
    FUSED_WITH_PACKS,
    GRAPH,
)
from benchmarks.models.workloads import TRAINING, Inputs
from epigemm.fusion import FusionReport
from epigemm.timing import Run

OUTPUT, GRADIENTS = "output", "gradients"
INDUCTOR, AOT_EAGER = "inductor", "aot_eager"

Results = dict[str, list[Tensor]]
_STEP = 1e-12


@dataclass
class Subject:
    """One model with what goes in, the same for all alternatives; they share its parameters.

    Attributes:
        upstream: the output's gradient; None for inference.
        compiler: what torch.compile compiles with, "inductor" or "aot_eager".
    """

    model: nn.Module
    inputs: Inputs
    upstream: Tensor | None
    compiler: str

    def results(self, forward: Callable[..., Tensor]) -> Results:
        """The output, and in training the gradient of every parameter."""
        if self.upstream is None:
            return {OUTPUT: [forward(*self.inputs)]}
        self.model.zero_grad(set_to_none=True)
        output = forward(*self.inputs)
        torch.autograd.backward(output, self.upstream)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return {OUTPUT: [output.detach()], GRADIENTS: gradients}

    def run(self, forward: Callable[..., Tensor]) -> Run:
        """A call as it is timed.

        In training it is a whole step, and SGD's update belongs to it: what fused layers keep of a weight is good until
        the weight changes, and a step without the update would let them keep it for nothing. The rate is so small that
        no parameter moves.
        """
        if self.upstream is None:
            return lambda: forward(*self.inputs)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=_STEP)
        upstream = self.upstream

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            output = forward(*self.inputs)
            torch.autograd.backward(output, upstream)
            optimizer.step()
            return output.detach()

        return step

    def exact(self, doubled: nn.Module) -> Results:
        """The same in float64, by a copy of the model in that type."""
        inputs = tuple(x.double() if x.is_floating_point() else x for x in self.inputs)
        upstream = None if self.upstream is None else self.upstream.double()
        exact = Subject(doubled, inputs, upstream, self.compiler)
        return exact.results(doubled)


@dataclass
class Alternative:
    """One way to call the model, ready to be called.

    Attributes:
        forward: takes the inputs.
        reports: what fusion found; filled at the first call by what is compiled.
    """

    forward: Callable[..., Tensor]
    reports: list[FusionReport] = field(default_factory=list)

    def sites(self) -> dict[str, int]:
        """Fused calls by function."""
        return dict(Counter(site.function for report in self.reports for site in report.sites))


def _fuse(subject: Subject) -> Alternative:
    fused: Any = epigemm.fuse(subject.model)
    return Alternative(fused, [fused.fusion_report])


def _fuse_with_packs(subject: Subject) -> Alternative:
    """Of a copy: the others would find the packs that belong to the parameters."""
    fused: Any = epigemm.fuse(copy.deepcopy(subject.model), inplace=True, keep_packs=True)
    return Alternative(fused, [fused.fusion_report])


def _compile(model: Any, compiler: str) -> Callable[..., Tensor]:
    compiled: Any = torch.compile(model, backend=compiler, dynamic=False)
    return compiled  # type: ignore[no-any-return]


def _backend(subject: Subject) -> Alternative:
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"report": reports.append, "backend": subject.compiler}
    compiled: Any = torch.compile(subject.model, backend="epigemm", dynamic=False, options=options)
    return Alternative(compiled, reports)


def _capture(subject: Subject, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    for _ in range(2):
        forward(*subject.inputs)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(*subject.inputs)

    def replay(*inputs: Tensor) -> Tensor:
        graph.replay()
        return output

    return replay


def _graph(subject: Subject) -> Alternative:
    return Alternative(_capture(subject, subject.model))


def _fuse_graph(subject: Subject) -> Alternative:
    fused = _fuse(subject)
    return Alternative(_capture(subject, fused.forward), fused.reports)


PREPARE: dict[str, Callable[[Subject], Alternative]] = {
    EAGER: lambda subject: Alternative(subject.model),
    FUSED: _fuse,
    FUSED_WITH_PACKS: _fuse_with_packs,
    GRAPH: _graph,
    FUSED_GRAPH: _fuse_graph,
    COMPILED: lambda subject: Alternative(_compile(subject.model, subject.compiler)),
    BACKEND: _backend,
}
GRAPHS = (GRAPH, FUSED_GRAPH)
SLOW = (COMPILED, BACKEND)
"""What takes long to prepare."""


@contextmanager
def gradients(mode: str) -> Iterator[None]:
    """Whether autograd records: in training alone."""
    with torch.set_grad_enabled(mode == TRAINING):
        yield


def select_alternatives(names: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Those asked for (none: all), and eager, in the order in which they are prepared.

    Raises:
        ValueError: an unknown name; names all of them.
    """
    for name in [*names, *exclude]:
        if name not in PREPARE:
            raise ValueError(f"--peers, --exclude: got {name!r}; with --models: {', '.join(PREPARE)}")
    return [
        name for name in PREPARE if name == EAGER or (name not in exclude and (not names or name in names))
    ]
