"""The base of the modes: set for all threads, for a block of one thread, and read by compiled code as a global."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from epigemm.arguments.modes import Mode, Shared


@pytest.fixture
def module() -> Iterator[Any]:
    """A mode's module, with what Dynamo would guard by."""
    made: Any = types.ModuleType("module_of_a_mode")
    made.active = False
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_blocks_are_nested(module: Any) -> None:
    mode = Mode(Shared(module.__name__))
    seen = [mode.enabled()]
    for enabled in (True, False, True):
        mode.enter(enabled)
        seen.append(mode.enabled())
    for _ in range(3):
        mode.exit()
        seen.append(mode.enabled())
    assert seen == [False, True, False, True, False, True, False]
    assert not module.active


def test_a_block_comes_before_what_holds_everywhere(module: Any) -> None:
    shared = Shared(module.__name__)
    mode = Mode(shared)
    shared.everywhere = True
    shared.update()
    assert mode.enabled() and module.active and not mode.enabled(otherwise=False)
    mode.enter(False)
    assert not mode.enabled() and not mode.enabled(otherwise=True)
    mode.exit()
    assert mode.enabled()


def test_another_thread_has_blocks_of_its_own(module: Any) -> None:
    mode = Mode(Shared(module.__name__))
    inside, may_leave, seen = threading.Event(), threading.Event(), list[bool]()

    def other() -> None:
        mode.enter(True)
        seen.append(mode.enabled())
        inside.set()
        may_leave.wait(60)
        mode.exit()

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    assert seen == [True] and not mode.enabled()
    assert module.active, "some thread is in a block"
    mode.enter(False)
    mode.exit()
    assert module.active
    may_leave.set()
    thread.join(60)
    assert not module.active
