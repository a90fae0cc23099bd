"""Modes that are set for all threads, for a block of one thread, or around a function: the switches of each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import epigemm
from epigemm.arguments import invariance


class Switches(NamedTuple):
    """A mode's block, its statement for all threads, what a call asks, and the global that compiled code reads."""

    block: Callable[..., Any]
    everywhere: Callable[..., Any]
    enabled: Callable[[], bool]
    module: Any


MODES = {
    "batch_invariant": Switches(
        epigemm.batch_invariant, epigemm.set_batch_invariant, epigemm.is_batch_invariant, invariance
    ),
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[Switches]:
    """Off before the test, and left off by it."""
    found = MODES[request.param]
    assert not found.enabled() and not found.module.active
    yield found
    left = found.enabled() or found.module.active
    found.everywhere(False)
    assert not left


def in_a_thread(look: Callable[[], Any]) -> Any:
    """What a new thread sees."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    return seen[0]


def in_a_block(mode: Switches, enabled: bool) -> bool:
    with mode.block(enabled):
        return mode.enabled()


@pytest.mark.parametrize("outer", [False, True])
def test_a_block_puts_back_what_was_before(mode: Switches, outer: bool) -> None:
    mode.everywhere(outer)
    for inner in (True, False):
        with mode.block(inner):
            assert mode.enabled() is inner
            with mode.block(not inner):
                assert mode.enabled() is not inner
            assert mode.enabled() is inner
        assert mode.enabled() is outer and in_a_thread(mode.enabled) is outer
    with pytest.raises(KeyError), mode.block(not outer):
        raise KeyError
    assert mode.enabled() is outer
    mode.everywhere(False)


def test_an_object_serves_many_blocks_and_switches_nothing_before(mode: Switches) -> None:
    first, second = mode.block(), mode.block(False)
    assert not mode.enabled() and not in_a_thread(mode.enabled)
    with first, second, first:
        assert mode.enabled() and not in_a_thread(mode.enabled)
    assert not mode.enabled()
    with first:
        assert mode.enabled()


def test_a_block_belongs_to_its_thread(mode: Switches) -> None:
    """Compiled code, which asks a global of all threads, sees that some thread is in one."""
    with mode.block():
        assert mode.enabled() and not in_a_thread(mode.enabled)
        assert in_a_thread(lambda: in_a_block(mode, True)) and mode.enabled()
        assert mode.module.active and in_a_thread(lambda: mode.module.active)
    assert in_a_thread(lambda: in_a_block(mode, True)) and not mode.enabled()


def test_a_statement_holds_in_every_thread(mode: Switches) -> None:
    """But a block around the call comes first, also where the statement is made inside of it."""
    mode.everywhere(True)
    assert mode.enabled() and in_a_thread(mode.enabled) and mode.module.active
    assert not in_a_thread(lambda: in_a_block(mode, False))
    mode.everywhere(False)
    assert not mode.enabled() and not in_a_thread(mode.enabled)
    with mode.block(False):
        mode.everywhere(True)
        assert not mode.enabled() and in_a_thread(mode.enabled)
    assert mode.enabled()
    mode.everywhere(False)


def test_a_decorated_function_runs_inside(mode: Switches) -> None:
    def run(depth: int) -> list[bool]:
        """Recursive, so that the decorator's own object is entered more than once."""
        return [mode.enabled(), *(inside(depth - 1) if depth else [])]

    inside: Callable[[int], list[bool]] = mode.block()(run)

    assert not mode.enabled(), "decorating switches nothing"
    assert inside(2) == [True] * 3 and inside.__name__ == "run"
    assert in_a_thread(lambda: inside(0)) == [True]


def test_functions_that_run_later_are_no_functions_to_decorate(mode: Switches) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for later in (generator, coroutine):
        with pytest.raises(TypeError, match="runs after the call; accepted are plain functions"):
            mode.block()(later)
