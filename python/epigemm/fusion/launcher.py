"""Captures CUDA graphs and replays them, with `torch.cuda.CUDAGraph`, on one device.

All graphs of a device use one memory pool, so the intermediate results of one graph use the memory of another's. This
is correct because no two of them run at once, and none reads what another has left there. A lock separates threads, and
an event separates streams. No other graph runs between the copies of a call's inputs and of its results.
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
    """A graph with its inputs and results."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The tensors that the graph reads, to which arguments are copied."""

    @property
    def streams(self) -> set[int]:
        """The streams that have used `inputs`."""

    def feed(self, args: tuple[Any, ...]) -> None:
        """Copy the arguments of a call to where the graph reads them."""

    def results(self, args: tuple[Any, ...]) -> Any:
        """The results of a call, copied from where the graph wrote them."""


class Launcher:
    """Captures and replays graphs on one device, while it holds `lock`.

    Attributes:
        lock: the device's lock.
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
        self._failed: list[torch.cuda.CUDAGraph] = []  # kept, because the allocator may still use them

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return capturing(self._device)

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """Capture what `run` launches, without executing it. Returns the graph, and the result of `run`.

        Raises:
            Exception: errors of `run`, or of CUDA if it cannot be captured. The capture has been ended then.
        """
        with torch.cuda.device(self._device):
            # Work on other streams, such as making packs, has to be finished before the graph reads it.
            torch.cuda.synchronize(self._device)
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # each thread's is made once, and not under capture
            graph = torch.cuda.CUDAGraph()
            other = next(
                iter(self._graphs), None
            )  # held until the capture ends, because a pool lives as long as its graphs
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
        """Begin a capture that does not restrict other threads, which may also draw random numbers.

        torch registers the device's generator with the graph, and until the capture has ended, drawing from it
        elsewhere is an error. No graph here draws random numbers, so another generator is registered instead.
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
        if self._raw not in launched.streams:  # the allocator has to know which streams use this memory
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
        """End a capture that failed. If CUDA has ended it, torch's allocator does not know."""
        with suppress(RuntimeError):
            graph.capture_end()
            return
        self._failed.append(graph)
        self._graphs = (
            weakref.WeakSet()
        )  # the allocator may still record into their pool, so later graphs get another one
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._index, pool)
            torch._C._cuda_releasePool(self._index, pool)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Switch autocast's cache off: it is freed at the end of autocast's block, and a graph would still read it."""
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
    """The launcher of a device; None if the device has no CUDA graphs."""
    if device.type != "cuda":
        return None
    return _on(torch.cuda.current_device() if device.index is None else device.index)
