"""The public interface as lines of text: names, signatures and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import epigemm

PACKAGE = Path(epigemm.__file__).parent
_MEMBERS = {"UserEpilogue": ("__call__", "elementwise"), "ResultsEpilogue": ("__call__", "elementwise")}
"""Of classes with members that are internal without an underscore: those that docs/functions.md has."""
_DUNDERS = ("__call__", "__getitem__", "__len__", "__iter__", "__enter__", "__exit__")


def lines() -> list[str]:
    """All of it, sorted: a line for each function, class, method, attribute and environment variable."""
    return sorted({*_of_module("epigemm", epigemm), *_variables()})


def names(found: list[str]) -> set[str]:
    """The names within such lines, those of parameters as `function(parameter=)`."""
    every = set()
    for line in found:
        name, _, rest = line.partition("(")
        name = name.partition(":")[0]
        every.add(name)
        inside = rest.rpartition(")")[0]
        parameters = (re.match(r"\**(\w+)", each.strip()) for each in _split(inside))
        every |= {f"{name}({each[1]}=)" for each in parameters if each}
    return every


def missing(before: list[str], now: list[str], removals: list[str]) -> list[str]:
    """Names that have gone without being listed. A name's removal includes that of what is in it."""
    gone = names(before) - names(now)
    return sorted(each for each in gone if not any(_covers(removal, each) for removal in removals))


def _covers(removal: str, name: str) -> bool:
    return name == removal or name.startswith((f"{removal}.", f"{removal}("))


def _split(parameters: str) -> Iterator[str]:
    """Parts between the commas that are in no bracket or quotes."""
    depth, start, quote = 0, 0, ""
    for place, letter in enumerate(parameters):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and not depth:
            yield parameters[start:place]
            start = place + 1
    yield parameters[start:]


def _of_module(name: str, module: ModuleType) -> Iterator[str]:
    for each in module.__all__:
        value = getattr(module, each)
        if isinstance(value, ModuleType):
            yield from _of_module(f"{name}.{each}", value)
        elif inspect.isclass(value):
            yield from _of_class(f"{name}.{each}", value)
        elif callable(value):
            yield _of_function(f"{name}.{each}", value)
        else:
            yield f"{name}.{each}: {type(value).__name__}"


def _of_class(name: str, kind: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if _is_outside(base) and base is not object)
    yield f"{_of_function(name, kind)}{f' is {bases}' if bases else ''}"
    members: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if not _is_outside(base)]):
        members |= vars(base)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for member in sorted({*members, *fields}):
        value = members.get(member)
        if (member.startswith("_") and member not in _DUNDERS) or member not in _MEMBERS.get(
            kind.__name__, [member]
        ):
            continue
        value = getattr(kind, member) if isinstance(value, (classmethod, staticmethod)) else value
        if member in fields or isinstance(value, property) or not callable(value):
            yield f"{name}.{member}: attribute"
        else:
            yield _of_function(f"{name}.{member}", value)


def _is_outside(kind: type) -> bool:
    return not kind.__module__.startswith("epigemm")


def _of_function(name: str, function: Callable[..., Any]) -> str:
    is_torchs = getattr(function, "__init__", None) is nn.Module.__init__
    signature = inspect.Signature() if is_torchs else inspect.signature(function)
    parameters = [
        each.replace(annotation=_unquoted(each.annotation)) for each in signature.parameters.values()
    ]
    result = _unquoted(signature.return_annotation)
    return f"{name}{signature.replace(parameters=parameters, return_annotation=result)}"


def _unquoted(annotation: object) -> object:
    return _Text(annotation) if isinstance(annotation, str) else annotation


class _Text(str):
    """A string that is written without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _variables() -> Iterator[str]:
    """Environment variables that the package reads."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield from (f"environ {each}" for each in re.findall(r'"(EPIGEMM_\w+)"', file.read_text()))
