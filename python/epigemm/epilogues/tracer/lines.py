"""Finds the user's code, and the line of it that is running."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_HERE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)


def is_users(filename: str) -> bool:
    """Whether a source file is the user's: not of torch, of this package or of Python itself."""
    return not filename.startswith((_TORCH, _HERE, "<frozen", "<eval_with_key>"))


def user_line(frame: FrameType, fallback: str) -> str:
    """`file:line` of the user's innermost frame."""
    for each, number in traceback.walk_stack(frame):
        name = each.f_code.co_filename
        if is_users(name) and "contextlib" not in name:
            return f"{name}:{number}"
    return fallback


def return_line(function: Callable[..., Any], last: str) -> str:
    """`file:line` of the `return` that follows the last call of torch, which is at `last`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return last
    file, _, number = last.rpartition(":")
    returns = {each.offset for each in dis.get_instructions(code) if each.opname.startswith("RETURN_")}
    lines = sorted(
        line for start, end, line in code.co_lines() if line and not returns.isdisjoint(range(start, end))
    )
    after = [line for line in lines if file == code.co_filename and line >= int(number)]
    return f"{code.co_filename}:{(after or lines[-1:])[0]}"
