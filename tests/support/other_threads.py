"""Threads that stand still at a chosen point, while a test looks at what the process is like then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TIMEOUT = 60.0
Work = Callable[[Callable[[], None]], None]
"""What a thread does; it calls its argument at the point at which it shall wait."""


@contextmanager
def others(*works: Work) -> Iterator[None]:
    """In the block each of these is at its innermost point, in a thread of its own."""
    done, errors = threading.Event(), list[BaseException]()
    reached = [threading.Event() for _ in works]

    def run(work: Work, inside: threading.Event) -> None:
        def wait() -> None:
            inside.set()
            assert done.wait(TIMEOUT)

        try:
            work(wait)
        except BaseException as error:
            errors.append(error)
            inside.set()

    threads = [threading.Thread(target=run, args=each) for each in zip(works, reached, strict=True)]
    for thread in threads:
        thread.start()
    try:
        assert all(each.wait(TIMEOUT) for each in reached)
        assert not errors, errors
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(TIMEOUT)
    assert not errors


class Holding(nn.Module):
    """A model whose trace waits inside."""

    def __init__(self, inside: Callable[[], None]) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        self.inside()
        return x * 2


def compile_until(inside: Callable[[], None]) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        inside()
        return graph.forward

    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(6, 8))


def export_until(inside: Callable[[], None]) -> None:
    torch.export.export(Holding(inside), (torch.ones(6, 8),))
