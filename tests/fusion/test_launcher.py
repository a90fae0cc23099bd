"""The launcher of CUDA graphs, with a stand-in for CUDA that records what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.fusion import launcher as launchers
from epigemm.fusion.launcher import Launcher, launcher_of, without_autocast_cache

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, number: int, log: list[str]) -> None:
        self.cuda_stream, self._log = number, log

    def wait_event(self, event: Any) -> None:
        self._log.append(f"{self.cuda_stream} waits")


class World:
    """What torch.cuda is asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream(1, self.log)
        self.pools = 0
        self.generator = Generator("usual")
        self.ends: list[Exception | None] = []  # what the next captures end with

    def graph(self) -> Any:
        world = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert world.generator.state != "usual", "others could not draw until the capture has ended"
                self._pool = pool
                world.log.append(f"begin in {pool}")

            def capture_end(self) -> None:
                world.log.append("end")
                error = world.ends.pop(0) if world.ends else None
                if error is not None:
                    raise error

            def pool(self) -> Any:
                return self._pool

            def replay(self) -> None:
                world.log.append(f"replay on {world.current.cuda_stream}")

        return Graph()

    def handle(self) -> int:
        self.pools += 1
        return self.pools


class Generator:
    """The generator of a device, or one of its states."""

    def __init__(self, name: str) -> None:
        self.state: Any = name

    def seed(self) -> None:
        pass

    def graphsafe_get_state(self) -> Any:
        return self.state

    def graphsafe_set_state(self, state: Any) -> None:
        self.state = state


class Event:
    def record(self, stream: Any) -> None:
        pass


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    fakes: dict[str, Callable[..., Any]] = {
        "Stream": lambda device: Stream(99, made.log),
        "Event": Event,
        "CUDAGraph": made.graph,
        "current_stream": lambda device: made.current,
        "graph_pool_handle": made.handle,
        "synchronize": lambda device: made.log.append("synchronize"),
        "current_blas_handle": lambda: 0,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "default_generators", (made.generator,))
    monkeypatch.setattr(torch, "Generator", lambda device: Generator("own"))
    monkeypatch.setattr(launchers, "_raw_stream", lambda index: made.current.cuda_stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: made.log.append("no pool"), False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: made.log.append("release"), False)
    return made


class Input:
    """A tensor, as far as the allocator is told of it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record_stream(self, stream: Stream) -> None:
        self._log.append(f"used on {stream.cuda_stream}")


class Entry:
    def __init__(self, graph: Any, log: list[str]) -> None:
        self.graph, self.streams, self._log = graph, set[int](), log
        self.inputs: Any = [Input(log)]

    def feed(self, args: tuple[Any, ...]) -> None:
        self._log.append(f"feed {args}")

    def results(self, args: tuple[Any, ...]) -> Any:
        self._log.append("take")
        return args


def test_which_devices_run_graphs() -> None:
    assert launcher_of(torch.device("cpu")) is None
    assert launcher_of(torch.device("meta")) is None


def test_one_launcher_a_device(world: World) -> None:
    assert launcher_of(CUDA) is launcher_of(CUDA)
    launchers._on.cache_clear()


def test_a_capture_runs_between_begin_and_end(world: World) -> None:
    launcher = Launcher(CUDA)
    launcher.capture(lambda: world.log.append(f"run with {world.generator.state}"))
    assert world.log == ["synchronize", "begin in 1", "run with usual", "end"]


def test_graphs_share_a_pool_while_one_of_them_lives(world: World) -> None:
    """A pool whose graphs are all gone cannot be captured to any more."""
    launcher = Launcher(CUDA)
    first, _ = launcher.capture(lambda: None)
    second, _ = launcher.capture(lambda: None)
    assert world.pools == 1
    del first
    third, _ = launcher.capture(lambda: None)
    assert world.pools == 1
    del second, third
    launcher.capture(lambda: None)
    assert world.pools == 2


def test_replays_wait_for_those_on_other_streams(world: World) -> None:
    launcher = Launcher(CUDA)
    graph, _ = launcher.capture(lambda: None)
    entry = Entry(graph, world.log)
    world.log.clear()
    assert launcher.replay(entry, (1,)) == (1,)
    assert world.log == ["used on 1", "feed (1,)", "replay on 1", "take"]
    world.log.clear()
    launcher.replay(entry, (2,))
    assert world.log == ["feed (2,)", "replay on 1", "take"]
    world.current = Stream(7, world.log)
    world.log.clear()
    launcher.replay(entry, (3,))
    assert world.log == ["7 waits", "used on 7", "feed (3,)", "replay on 7", "take"]


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()], ids=repr)
def test_what_raises_under_capture_ends_it(world: World, error: BaseException) -> None:
    launcher = Launcher(CUDA)

    def run() -> None:
        raise error

    with pytest.raises(type(error)):
        launcher.capture(run)
    assert world.log[1:] == ["begin in 1", "end"]
    launcher.capture(lambda: None)
    assert world.pools == 2


def test_a_capture_that_cuda_ends_leaves_the_allocator_as_it_was(world: World) -> None:
    launcher = Launcher(CUDA)
    earlier, _ = launcher.capture(lambda: None)
    world.log.clear()
    invalid = RuntimeError("operation failed due to a previous error during capture")
    world.ends = [invalid, invalid]
    with pytest.raises(RuntimeError, match="previous error"):
        launcher.capture(lambda: None)
    assert world.log[1:] == ["begin in 1", "end", "end", "no pool", "release"]
    launcher.capture(lambda: None)
    assert world.pools == 2, earlier


def test_autocast_caches_nothing_under_capture() -> None:
    weight, x = torch.rand(8, 8, requires_grad=True), torch.rand(8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before: Tensor = x @ weight
        assert torch.is_autocast_cache_enabled()
        with without_autocast_cache():
            assert not torch.is_autocast_cache_enabled()
            assert torch.equal(x @ weight, before)
        assert torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()
