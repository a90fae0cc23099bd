"""Restores a module's state after a call that only explains."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
    modules = list(module.modules())
    # The attributes, and the contents of those that are dictionaries, such as buffers and hooks.
    each_dict = [vars(each) for each in modules]
    each_dict += [value for own in each_dict for value in own.values() if isinstance(value, dict)]
    was = [(own, list(own.items())) for own in each_dict]
    kinds = {kind for each in modules for kind in type(each).__mro__ if kind not in _BUILT_IN}
    classes = [(kind, dict(vars(kind))) for kind in kinds]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    copies: dict[int, Tensor] = {}
    try:
        for each in modules:
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    each._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for kind, members in classes:
            for name in [name for name in vars(kind) if name not in members]:
                delattr(kind, name)
            for name, value in members.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        for own, items in was:
            now = list(own.items())
            if len(now) != len(items) or any(
                a != b or x is not y for (a, x), (b, y) in zip(now, items, strict=True)
            ):
                own.clear()
                own.update(items)
