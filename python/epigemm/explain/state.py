"""Restores a module's state after a call that only explains."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_BUILT_IN = (nn.Module, object)


@contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Restore what a call changes in a module and in random generators.

    During the call, buffers are copies. Afterwards attributes of the modules and of their classes (numbers, flags,
    hooks, other objects) and the generators of Python, NumPy, the CPU and all GPUs are restored. Changes inside an
    object that is not a buffer, such as a list, are not undone.
    """
    was = [(each, _attributes(each)) for each in module.modules()]
    copies: dict[int, Tensor] = {}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    kinds = {kind for each in module.modules() for kind in type(each).__mro__ if kind not in _BUILT_IN}
    classes = [(kind, dict(vars(kind))) for kind in kinds]
    try:
        for each, _ in was:
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    made = copies.setdefault(id(buffer), buffer.detach().clone())
                    each._buffers[name] = made
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for kind, members in classes:
            _restore_class(kind, members)
        for each, attributes in was:
            _restore(each, attributes)


def _restore_class(kind: type, members: dict[str, Any]) -> None:
    for name, value in list(vars(kind).items()):
        if name not in members:
            delattr(kind, name)
        elif value is not members[name]:
            setattr(kind, name, members[name])
    for name in members.keys() - vars(kind).keys():
        setattr(kind, name, members[name])


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All attributes, and the contents of those that are dictionaries, such as buffers and hooks."""
    return {name: (value, _copied(value)) for name, value in vars(module).items()}


def _copied(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else None


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for name in own.keys() - attributes.keys():
        del own[name]
    for name, (value, items) in attributes.items():
        if own.get(name) is not value:
            own[name] = value
        if items is not None and not _are_same(list(value.items()), items):
            value.clear()
            value.update(items)


def _are_same(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
