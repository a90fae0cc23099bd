"""What the tests of compiled calls have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import guards


def measure_no_guards() -> None:
    """Keep Dynamo from measuring each compilation's guards for a log: that takes 24 ms, a sixth of a small one."""
    if hasattr(guards, "profile_guard_manager"):
        setattr(guards, "profile_guard_manager", lambda *_: 0.0)  # noqa: B010  # mypy: torch exports no such name


def join_logs() -> None:
    """Let torch's loggers hand on what they log: to each that does not, pytest adds its handlers in every test anew."""
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that records the operators of ours in each graph, and runs it as it is."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.count += 1
        self.nodes = [node for node in graph.graph.nodes if str(node.target).startswith("epigemm.")]
        return graph.forward

    @property
    def names(self) -> list[str]:
        return [str(node.target).split(".")[1] for node in self.nodes]

    def is_native(self) -> bool:
        assert self.names
        return all(name == "_into" for name in self.names)


def recorded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Graphs:
    graphs = Graphs()
    torch.compile(call, fullgraph=True, backend=graphs)(*args, **kwargs)
    return graphs
