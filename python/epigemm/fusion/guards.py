"""What Dynamo does not guard: which objects modules are, what hides their members, and the sign of zero."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import DictGetItemSource, GetItemSource, NNModuleSource
from torch._guards import Guard, GuardsSet

_MEMBERS = ("_modules", "_parameters", "_buffers")
_ZERO = re.compile(r"\b0\.0\b|\b0j|\b0[+-].*j")


def guard_more(guards: GuardsSet) -> None:
    """Guard more of what a graph is made of: to be called while Dynamo collects its guards."""
    for guard in list(guards):
        source: Any = guard.originating_source
        if isinstance(source, NNModuleSource):
            guards.add(Guard(source, GuardBuilder.ID_MATCH))
        if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            guards.add(Guard(source, _exactly))
        while isinstance(source, NNModuleSource):
            source = source.base
        within: Any = getattr(source, "base", None)
        if isinstance(source, DictGetItemSource) and getattr(within, "member", "") in _MEMBERS:
            guards.add(Guard(within.base, partial(_not_hidden, name=source.index)))


def _exactly(builder: Any, guard: Guard) -> None:
    """A guard that a constant is equal does not see the sign of its zeros, nor what changes inside of it in place.

    Zeros are guarded by how they are written.
    """
    value = builder.get(guard)
    if isinstance(value, (tuple, list)):
        for place in range(len(value)):
            part = Guard(GetItemSource(guard.originating_source, place), GuardBuilder.EQUALS_MATCH)
            builder.EQUALS_MATCH(part)
            _exactly(builder, part)
    elif not isinstance(value, str) and _ZERO.search(text := repr(value)):
        same = (lambda now: repr(now) == text), [f"repr of {guard.name} == {text!r}"]
        manager = builder.get_guard_manager(guard)
        try:
            manager.add_lambda_guard(*same, None)
        except TypeError:  # torch 2.10
            manager.add_lambda_guard(*same)


def _not_hidden(builder: Any, guard: Guard, name: str) -> None:
    """What is in a module's `__dict__` comes before its parameters, buffers and modules."""
    if name not in builder.get(guard).__dict__:
        builder.NOT_PRESENT_IN_GENERIC_DICT(guard, attr=name)
