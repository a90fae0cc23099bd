"""What a trace took for granted: Python values that the traced forward read, watched at every later call.

A trace holds the values that `self.scaling_factor` or `self.training` had. A guard remembers them, and says
whether they still hold; where they do not, the module's own forward runs.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.fusion.state import why_not_callable

_PRIMITIVES = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, range, slice)
_BY_IDENTITY = (nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MOST_PARTS = 512


class Unwatchable(Exception):
    """A value whose changes could not be noticed."""


def is_primitive(value: Any) -> bool:
    """A value that is compared as it is."""
    return type(value) in _PRIMITIVES


def snapshot(value: Any) -> Any:
    """What `value` holds now, to be compared with `==`; Unwatchable where that cannot be told."""
    return _snapshot(value, [_MOST_PARTS], set())


def _snapshot(value: Any, left: list[int], above: set[int]) -> Any:
    left[0] -= 1
    kind = type(value)
    if left[0] < 0 or id(value) in above:
        raise Unwatchable(f"a {kind.__name__} that is too large")
    if kind in _PRIMITIVES or isinstance(value, _CONSTANTS):
        return kind, repr(value) if kind is float else value
    if isinstance(value, Tensor):
        return _Same(value), value._version
    if isinstance(value, types.MethodType):
        return _Same(value.__self__), value.__name__
    if isinstance(value, _BY_IDENTITY):
        return _Same(value)
    above = above | {id(value)}
    if isinstance(value, (list, tuple)):
        return kind, [_snapshot(part, left, above) for part in value]
    if isinstance(value, dict):
        return kind, [(_snapshot(k, left, above), _snapshot(v, left, above)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, {_hashable(part) for part in value}
    if hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
        return _Same(value), _snapshot(vars(value), left, above)
    raise Unwatchable(f"a {kind.__name__}")


def _hashable(value: Any) -> Any:
    if type(value) not in _PRIMITIVES:
        raise Unwatchable(f"a set of {type(value).__name__}")
    return value


class _Same:
    """Equal to itself around the same object alone; keeps it alive, so that no other can pass for it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class Guard:
    """What must still hold of a module for its trace to be its forward.

    Attributes:
        primitives: (path of the submodule, attribute, value).
        others: (path, attribute, snapshot).
        names: (namespace of a function, name, value) of globals and closures.
        layout: the kinds of its children, and which of its parameters and buffers are None.
    """

    primitives: list[tuple[tuple[str, ...], str, Any]] = field(default_factory=list)
    others: list[tuple[tuple[str, ...], str, Any]] = field(default_factory=list)
    names: list[tuple[Callable[[], Any], str, Any]] = field(default_factory=list)
    layout: Any = None

    def record(self, path: tuple[str, ...], name: str, value: Any) -> None:
        """Remember a value that was read; Unwatchable where its changes could not be seen."""
        known = self.primitives if is_primitive(value) else self.others
        if any(entry[:2] == (path, name) for entry in known):
            return
        known.append((path, name, value if is_primitive(value) else snapshot(value)))

    def reads_training(self) -> bool:
        """Whether the forward asked for the mode."""
        return any(name == "training" for _, name, _ in self.primitives)

    def why_broken(self, module: nn.Module) -> str:
        """What has changed since the trace; empty where nothing has."""
        if layout(module) != self.layout:
            return "its children, or which parameters are None, have changed"
        for path, name, value in self.primitives:
            now = getattr(descend(module, path), name, _MISSING)
            if type(now) is not type(value) or (now != value and not (now != now and value != value)):
                return f"{'.'.join((*path, name))} is {now!r}, it was {value!r}"
        if (self.others or self.names) and torch.compiler.is_compiling():
            return "it reads values that are not watched while torch.compile traces"
        for path, name, value in self.others:
            if not _still(getattr(descend(module, path), name, _MISSING), value):
                return f"{'.'.join((*path, name))} has changed"
        for read, name, value in self.names:
            if read() != value:
                return f"the global {name} has changed"
        return ""


_MISSING = object()


def _still(value: Any, was: Any) -> bool:
    try:
        return bool(snapshot(value) == was)
    except Unwatchable:
        return False


def descend(module: nn.Module, path: tuple[str, ...]) -> Any:
    """The submodule at a path; None where there is none."""
    found: Any = module
    for name in path:
        found = None if found is None else found._modules.get(name)
    return found


def layout(module: nn.Module) -> Any:
    """The kinds of a module's children, also of those in lists and dicts, and which of its tensors are None."""
    children = [(name, original_class(child), _inside(child)) for name, child in module._modules.items()]
    # Not which there are: the replicas of nn.DataParallel have none, but tensors for attributes.
    absent = [
        name for names in (module._parameters, module._buffers) for name in names if names[name] is None
    ]
    return children, absent


def original_class(module: nn.Module | None) -> type:
    """The class of a module, that which it had before it was fused."""
    kind = type(module)
    return getattr(kind, "_epigemm_original", kind)


def is_transparent(module: nn.Module) -> bool:
    """Whether calling the module is calling its children in turn, and nothing else."""
    return original_class(module) is nn.Sequential and not why_not_callable(module)


def _inside(child: nn.Module | None) -> Any:
    return (layout(child), is_transparent(child)) if isinstance(child, _CONTAINERS) else None


def globals_of(function: Any) -> Iterator[tuple[Callable[[], Any], str, Any]]:
    """Numbers, strings and the like that a function reads from its module and its closure."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    scope = function.__globals__
    for name in code.co_names:
        if name in scope and is_primitive(scope[name]):
            yield partial(scope.get, name, _MISSING), name, scope[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        read = partial(getattr, cell, "cell_contents", _MISSING)
        if is_primitive(value := read()):
            yield read, name, value
