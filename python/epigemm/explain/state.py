"""Restores a module's state after a call that only explains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Restore what a call changes in a module and in random generators.

    During the call, buffers are copies. Afterwards attributes of the modules (numbers, flags, hooks, other objects) and
    the generators of the CPU and of all GPUs are restored. Changes inside an object that is not a buffer, such as a
    list, are not undone.
    """
    was = [(each, _attributes(each)) for each in module.modules()]
    copies: dict[int, Tensor] = {}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        for each, _ in was:
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    made = copies.setdefault(id(buffer), buffer.detach().clone())
                    each._buffers[name] = made
        with torch.random.fork_rng(devices):
            yield
    finally:
        for each, attributes in was:
            _restore(each, attributes)


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
