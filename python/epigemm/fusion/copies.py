"""A copy of a model that shares its tensors."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def copied(model: nn.Module) -> nn.Module | str:
    """A copy with the same tensors, or why there is none."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors_within(model, set())}
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:  # any error of the model's attributes
        return f"it cannot be copied ({type(error).__name__}: {error})"
    return _why_no_copy(model, made) or made


def copied_apart(value: Any) -> Any:
    """A copy of a model and what belongs to it that shares no memory with them."""
    # deepcopy refuses tensors with a history.
    recorded = [each for each in _tensors_within(value, set()) if not each.is_leaf]
    memo: dict[int, Any] = {id(each): each.detach().clone() for each in recorded}
    return copy.deepcopy(value, memo)


def _tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that can be reached from an object, also through modules and lists that are not registered."""
    if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in list(value.values()):
            yield from _tensors_within(part, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in list(value):
            yield from _tensors_within(part, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors_within(vars(value), seen)


def _why_no_copy(model: nn.Module, copied: Any) -> str:
    """What is wrong with a copy by a class's own `__copy__`; empty if it is a copy that shares every tensor."""
    if not isinstance(copied, nn.Module) or type(copied) is not type(model):
        return f"its copy is a {type(copied).__name__}"
    for kind in ("modules", "parameters", "buffers"):
        mine, other = (
            dict(getattr(each, f"named_{kind}")(remove_duplicate=False)) for each in (model, copied)
        )
        shares = kind != "modules"
        if list(mine) != list(other) or any((mine[name] is other[name]) is not shares for name in mine):
            return f"its copy {'does not share' if shares else 'shares, or has other,'} {kind}"
    return ""
