"""csrc/python/watch.cpp: what CPython tells of is counted, from 3.12 on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from epigemm import _native

ENTRY: Any = _native.entry
IS_TOLD = sys.version_info >= (3, 12)

pytestmark = pytest.mark.skipif(ENTRY is None, reason=_native.no_entry)
told = pytest.mark.skipif(not IS_TOLD, reason="CPython tells of no changes")


class Above:
    def method(self) -> int:
        return 1


class Beside:
    pass


class Below(Above):
    value = 0


def other(self: Any) -> int:
    return 2


MODULE: Any = ModuleType("watched")
MODULE.value = 0
CHANGES: list[Callable[[], object]] = [
    lambda: setattr(MODULE, "value", object()),
    lambda: vars(MODULE).update(more=object()),
    lambda: delattr(MODULE, "more"),
    lambda: setattr(Below, "value", object()),
    lambda: setattr(Below, "more", object()),
    lambda: delattr(Below, "more"),
    lambda: setattr(Above, "more", object()),
    lambda: setattr(Below, "__bases__", (Beside, Above)),
    lambda: setattr(Below, "__bases__", (Above,)),
    lambda: setattr(Above.method, "__code__", other.__code__),
]


def test_whether_changes_are_told_is_said() -> None:
    assert ENTRY.watch() is ENTRY.watch(vars(MODULE), Below) is IS_TOLD
    assert not ENTRY.watch(vars(MODULE), MODULE)


@told
def test_each_change_is_counted() -> None:
    for change in CHANGES:
        assert ENTRY.watch(vars(MODULE), Below)
        before = ENTRY.changes()
        change()
        assert ENTRY.changes() > before


@told
def test_nothing_else_is_counted() -> None:
    """Functions and objects that are made, and changes of what is not watched."""
    assert ENTRY.watch(vars(MODULE), Below)
    before = ENTRY.changes()
    made: Any = Below()
    made.value = (lambda: made)()
    setattr(Beside, "more", MODULE.value)  # noqa: B010
    vars(made)["other"] = made.method()
    assert ENTRY.changes() == before


@told
def test_a_class_that_changes_too_often_is_not_watched() -> None:
    """CPython 3.13 gives a class so many versions."""
    for turn in range(3000):
        before = ENTRY.changes()
        if not ENTRY.watch(Beside):
            break
        Beside.turn = turn  # type: ignore[attr-defined]
        assert ENTRY.changes() > before


LOAD = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("_entry", sys.argv[1])
entry = importlib.util.module_from_spec(spec)
spec.loader.exec_module(entry)
"""
FULL = """
add = ctypes.pythonapi.{function}
callback = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * {count})(lambda *_: 0)
try:
    for _ in range(9): add(callback)
except RuntimeError:
    pass
assert not entry.watch({{}})
"""
ENDS = """
class Kind: pass
assert entry.watch(globals(), vars(sys), Kind)
Kind.value = lambda: Kind
"""


@told
@pytest.mark.parametrize(("function", "count"), [("PyDict_AddWatcher", 4), ("PyType_AddWatcher", 1)])
def test_where_others_have_all_watchers(function: str, count: int) -> None:
    assert run(FULL.format(function=function, count=count)) == (0, "")


@told
def test_the_interpreter_ends_while_all_is_watched() -> None:
    assert run(ENDS) == (0, "")


def run(code: str) -> tuple[int, str]:
    """The code's exit status and errors, in an interpreter with nothing but the entry."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD + code, ENTRY.__file__], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr
