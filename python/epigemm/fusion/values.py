"""Values that a trace bakes in: which ones can be compared later, and how."""

from __future__ import annotations

import math
from typing import Any

import torch

PRIMITIVES = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice)


def is_primitive(value: Any) -> bool:
    """A value that never changes and is compared as it is."""
    return type(value) in PRIMITIVES


def is_constant(value: Any) -> bool:
    """A primitive, or one of the values that stand for a dtype, a device, a choice."""
    # Members of an Enum are none: they may have attributes, which change.
    return type(value) in PRIMITIVES or type(value) in _CONSTANTS


def same(now: Any, was: Any) -> bool:
    """Whether two values are the same in type and value; 0.0 and -0.0 are two, nan and nan are one."""
    kind = type(was)
    if type(now) is not kind:
        return False
    if kind is float:
        return (now == was and (was != 0 or math.copysign(1.0, now) == math.copysign(1.0, was))) or (
            now != now and was != was
        )
    if kind is complex:
        return same(now.real, was.real) and same(now.imag, was.imag)
    if kind is tuple or kind is list:
        return len(now) == len(was) and all(same(a, b) for a, b in zip(now, was, strict=True))
    if kind is dict:
        return same(list(now), list(was)) and all(same(now[key], was[key]) for key in was)
    if kind is range or kind is slice:  # range(0, 3, 2) == range(0, 4, 2), slice(0) == slice(0.0)
        return same((now.start, now.stop, now.step), (was.start, was.stop, was.step))
    if kind in PRIMITIVES or kind in _CONSTANTS:
        return bool(now == was)
    return now is was
