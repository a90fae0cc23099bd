"""Which code is the user's, and which line of it is running."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def is_users(filename: str) -> bool:
    """Whether a source file is neither torch's nor this package's nor Python's own machinery."""
    return not filename.startswith((_TORCH, _HERE, "<frozen", "<eval_with_key>"))


def user_line(frame: FrameType | None, fallback: str) -> str:
    """`file:line` of the innermost frame of the user's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name) and "contextlib" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback
