"""Captures CUDA graphs and replays them: by `torch.cuda.CUDAGraph` alone, on one device.

All graphs of a device lie in one memory pool, so that one graph's intermediate results take the memory of another's.
That is right because no two of them run at once, and none reads what another has left there: a lock keeps threads
apart, an event the streams, and between what is copied in and what is copied out no other graph runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from epigemm.cuda_graphs import capturing

Result = TypeVar("Result")
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch it on the current stream."""


class Launched(Protocol):
    """A graph with what goes in and comes out."""

    @property
    def graph(self) -> Graph:
        """What is replayed."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What the graph reads and arguments are copied to."""

    @property
    def streams(self) -> set[int]:
        """The streams that have used `inputs`."""

    def feed(self, args: tuple[Any, ...]) -> None:
        """Copy the arguments of a call to where the graph reads them."""

    def results(self, args: tuple[Any, ...]) -> Any:
        """The results of a call, copied from where the graph wrote them."""


class Launcher:
    """Captures and replays graphs on one device; `lock` is held while it does.

    Attributes:
        lock: one for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of the last replay, on any stream
        self._stream = torch.cuda.current_stream(device)
        self._raw = self._stream.cuda_stream
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []  # the allocator may go on asking them

    def is_capturing(self) -> bool:
        """Whether somebody captures what is launched now."""
        return capturing(self._device)

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """Capture what `run` launches, without running it; the graph, and what `run` returned.

        Raises:
            Exception: what `run` raises, or CUDA where it cannot be captured. Nothing is captured any more then.
        """
        with torch.cuda.device(self._device):
            # What was begun on other streams, packs among it, is there when the graph reads it.
            torch.cuda.synchronize(self._device)
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # each thread's is made once, and not under capture
            graph = torch.cuda.CUDAGraph()
            other = next(
                iter(self._graphs), None
            )  # held until the capture ends: the pool lives as its graphs do
            pool = torch.cuda.graph_pool_handle() if other is None else other.pool()
            with torch.cuda.stream(self._side), without_autocast_cache():
                try:
                    self._begin(graph, pool)
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, pool)
                    raise
            self._graphs.add(graph)
        return graph, result

    def _begin(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Begin a capture; other threads may do meanwhile what it forbids, and draw random numbers.

        The device's generator counts as captured with the graph: until the capture has ended well, whoever draws from
        it elsewhere gets an error. No graph here draws, so a generator of its own takes that place.
        """
        usual = torch.cuda.default_generators[self._index]
        state = usual.graphsafe_get_state()
        own = torch.Generator(self._device)
        own.seed()
        usual.graphsafe_set_state(own)
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        finally:
            usual.graphsafe_set_state(state)

    def replay(self, launched: Launched, args: tuple[Any, ...]) -> Any:
        """Run a graph on the current stream, for the arguments of a call."""
        if _raw_stream(self._index) != self._raw:
            self._stream = torch.cuda.current_stream(self._device)
            self._raw = self._stream.cuda_stream
            self._stream.wait_event(self._done)
        if self._raw not in launched.streams:  # the allocator has to know who uses memory of another stream
            launched.streams.add(self._raw)
            for tensor in launched.inputs:
                tensor.record_stream(self._stream)
        try:
            launched.feed(args)
            launched.graph.replay()
            return launched.results(args)
        finally:
            self._done.record(self._stream)

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed. Where CUDA has ended it, torch's allocator has not been told so."""
        with suppress(RuntimeError):
            graph.capture_end()
            return
        self._failed.append(graph)
        self._graphs = (
            weakref.WeakSet()
        )  # an allocator may go on recording into their pool: later ones get another
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._index, pool)
            torch._C._cuda_releasePool(self._index, pool)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Cast weights anew: what autocast has cached is freed at the end of its block, and a graph would read it on."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
        torch.clear_autocast_cache()


@cache
def _on(index: int) -> Launcher:
    return Launcher(torch.device("cuda", index))


def launcher_of(device: torch.device) -> Launcher | None:
    """The launcher of a device; None where it runs no graphs."""
    if device.type != "cuda":
        return None
    return _on(torch.cuda.current_device() if device.index is None else device.index)
