"""Defaults and closures of the functions that Dynamo inlined into a graph.

Dynamo takes both for constants. From torch 2.13 on it guards them, if it knows from where the traced code has the
function: not for `__init__` of a class of which the code makes an object. Before, it does so for some functions alone.
A graph would go on with the values that it was made with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, is_
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.variables.functions import UserFunctionVariable

ARE_GUARDED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
CHANGED = "a function has other defaults or another closure since"
_defaults_of, _content_of = attrgetter("__defaults__"), attrgetter("cell_contents")
_EMPTY = object()
# Values that hold no others. What `dataclass` makes has annotations in its closure.
_OF_ANNOTATIONS = ("typing", "types", "dataclasses")
_ALONE = (int, float, complex, str, bytes, type(None), type, ModuleType, BuiltinFunctionType)
_Look = Callable[[Any], bool]  # whether a value is still the one that was noted


@contextmanager
def noted(inlined: Inlined) -> Iterator[None]:
    """In the block, which holds Dynamo's lock, have it note each function that Dynamo inlines and does not guard."""
    bind = UserFunctionVariable.bind_args  # reads the defaults and the closure

    def bind_noted(function: Any, *args: Any) -> Any:
        if not (ARE_GUARDED and function.get_source()):
            inlined.note(function.fn)
        return bind(function, *args)

    with patch.object(UserFunctionVariable, "bind_args", bind_noted):
        yield


class Inlined:
    """What the functions that were inlined had as defaults and in their closures.

    Attributes:
        compares: whether one of them had any.
    """

    def __init__(self) -> None:
        self.compares = False
        self._seen = weakref.WeakSet[Any]()
        # Loops in C compare these: they may be many.
        self._functions: list[FunctionType] = []
        self._defaults: list[Any] = []
        self._cells: list[CellType] = []
        self._contents: list[Any] = []
        # Loops in Python: defaults that can change in place, and closures that may hold layers.
        self._lists: list[tuple[Any, _Look]] = []
        self._closures: list[_Closure] = []

    def note(self, function: Any) -> None:
        """Compare also this function, with what it has now."""
        if not isinstance(function, FunctionType) or function in self._seen:
            return
        self._seen.add(function)
        cells = _cells(function)
        self.compares |= bool(cells or function.__defaults__ or function.__kwdefaults__)
        if not all(map(_is_no_model, map(_content, cells))):
            self._closures.append(_Closure(function))
            return
        if function.__kwdefaults__:
            self._lists.append((function, _same_named(function)))
        if function.__defaults__:
            self._functions.append(function)
            self._defaults.append(function.__defaults__)
            self._lists += _lists(function.__defaults__)
        cells = [cell for cell in cells if _content(cell) is not _EMPTY]
        self._cells += cells
        self._contents += map(_content_of, cells)

    def have_changed(self) -> bool:
        """Whether one of them has others now."""
        return not (
            all(map(is_, map(_defaults_of, self._functions), self._defaults))
            and all(map(is_, map(_content_of, self._cells), self._contents))
            and all(look(each) for each, look in self._lists)
            and all(map(_Closure.is_same, self._closures))
        )


class _Closure:
    """A function whose closure may hold layers: it is not kept alive, as another one may take its place."""

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self._defaults = function.__defaults__
        self._lists = _lists(self._defaults or ())
        self._named = _same_named(function)
        self._looks = [_identity(_content(cell)) for cell in _cells(function)]

    def is_same(self) -> bool:
        function = self._function()
        if function is None:
            return True
        if function.__defaults__ is not self._defaults or not self._named(function):
            return False
        looks = zip(self._looks, map(_content, _cells(function)), strict=True)
        return all(look(each) for look, each in looks) and all(look(each) for each, look in self._lists)


def _cells(function: FunctionType) -> list[CellType]:
    """Of its closure, but for the class that methods with `super()` hold."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [cell for name, cell in pairs if name != "__class__"]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_no_model(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether it holds no layers and no tensors, so that it may be kept alive. False where that is not plain."""
    if isinstance(value, FunctionType):
        within = (*map(_content, _cells(value)), *(value.__defaults__ or ()))
        seen |= {id(value)}
        return all(_is_no_model(each, seen) for each in within if id(each) not in seen)
    return value is _EMPTY or isinstance(value, _ALONE) or type(value).__module__ in _OF_ANNOTATIONS


def _lists(defaults: tuple[Any, ...]) -> list[tuple[Any, _Look]]:
    """Those of a function's defaults that Dynamo reads without a guard, though they can change in place."""
    return [(each, _same_parts(each)) for each in defaults if _can_change(each)]


def _can_change(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_can_change, value))
    return isinstance(value, (list, dict, set))


def _same_named(function: FunctionType) -> _Look:
    """Whether a function has the keyword-only defaults that this one has now."""
    look = _same_parts(function.__kwdefaults__ or {})
    return lambda now: look(now.__kwdefaults__ or {})


def _same_parts(value: Any) -> _Look:
    if isinstance(value, dict):
        keys, values = _same_parts([*value]), _same_parts([*value.values()])
        return lambda now: keys([*now]) and values([*now.values()])
    if isinstance(value, set):
        was = {*value}
        return lambda now: bool(now == was)
    if not isinstance(value, (list, tuple)):
        return _identity(value)
    looks = [_same_parts(each) for each in value]
    return lambda now: len(now) == len(looks) and all(map(_applied, looks, now))


def _applied(look: _Look, now: Any) -> bool:
    return look(now)


def _identity(value: Any) -> _Look:
    if isinstance(value, Tensor):  # those with weak references cannot be swapped (torch.utils.swap_tensors)
        address = id(value)
        return lambda now: id(now) == address
    try:
        of = weakref.ref(value)
    except TypeError:  # numbers, strings, lists
        return lambda now: now is value
    return lambda now: now is of()
