"""A launcher for the CPU: its graphs run again what was captured, and write to the same memory; models for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm


@dataclass
class Rerun:
    """A graph that runs a function once more, in the mode that it was captured in."""

    run: Callable[[], Any]
    found: Sequence[Any]
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode(False), torch.no_grad():
            for written, made in zip(self.found, self.run(), strict=True):
                if isinstance(written, Tensor) and written.data_ptr() != made.data_ptr():
                    whole(written).copy_(whole(made))


@dataclass
class StandIn:
    """Counts what it is asked for.

    Attributes:
        outer: somebody else is capturing.
        fails: raised by captures.
    """

    outer: bool = False
    fails: Exception | None = None
    graphs: list[Rerun] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    inside: int = 0

    def is_capturing(self) -> bool:
        return self.outer

    def capture(self, run: Callable[[], Any]) -> tuple[Rerun, Any]:
        assert self.inside == 0
        if self.fails is not None:
            raise self.fails
        with torch.inference_mode(False), torch.no_grad():
            found = run()
        graph = Rerun(run, found)
        self.graphs.append(graph)
        return graph, found

    def replay(self, launched: Any, args: tuple[Any, ...]) -> Any:
        self.inside += 1
        assert self.inside == 1, "one at a time"
        launched.feed(args)
        launched.graph.replay()
        found = launched.results(args)
        # Other graphs take this memory for what is theirs.
        kept = {_memory(value) for value in (*args, *launched.inputs) if isinstance(value, Tensor)}
        for tensor in launched.graph.found:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and _memory(tensor) not in kept:
                tensor.fill_(float("nan"))
        self.inside -= 1
        return found

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Block(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.register_buffer("table", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.fc2(F.gelu(self.fc1(x)))) * self.table
        return found


class Function(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 8), function

    def forward(self, *args: Any) -> Any:
        return self.function(self.fc(args[0]), *args)


def fused(model: nn.Module) -> Any:
    return epigemm.fuse(model.eval(), cuda_graphs=True)


def reasons(model: Any) -> str:
    return "; ".join(model.fusion_report.cuda_graphs.reasons)


def assert_same(mine: Any, model: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(mine(*args), model(*args), rtol=1e-5, atol=1e-5)
