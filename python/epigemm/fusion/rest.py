"""Fused forwards and sites rest where fusing is not worth it: what they replaced runs, for a while, at its own speed.

Whether a call is worth it shows at every site (`worth.py`), and to look takes microseconds. Where a site was not, what
it replaced runs for the next calls alike; where no site of a forward was fused, the original forward. That is right
whatever has changed since. While the forward of a module rests, those inside of it do, too, without a look.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_CALLS = 256  # then it looks again: a setting of torch's may be another one
_grad_enabled = torch.is_grad_enabled
_is_current_stream_capturing = torch.cuda.is_current_stream_capturing


class Fused:
    """How many calls of sites ran fused, in this process and in eager mode."""

    calls = 0


class Sleep(threading.local):
    """Whether the forward of a module around this one rests, in this thread."""

    deep = False


sleep = Sleep()


class Rest:
    """Of one fused module, or one site.

    Attributes:
        left: for how many calls more.
    """

    __slots__ = ("_dtype", "_grad", "_shape", "left")

    def __init__(self) -> None:
        self.left = 0
        self._shape: torch.Size | None = None
        self._dtype: torch.dtype | None = None
        self._grad = False

    def lasts(self, x: Any) -> bool:
        """Whether what was replaced is to run for a call with this first argument."""
        if (
            self.left <= 0  # two threads may have taken the last one
            or type(x) is not Tensor
            or x.shape != self._shape
            or x.dtype is not self._dtype
            or _grad_enabled() is not self._grad
            or _captures(x)
        ):
            return False
        self.left -= 1
        return True

    def begin(self, x: Any) -> None:
        """Nothing was worth fusing in a call with this first argument."""
        if type(x) is Tensor and not _captures(x):
            self._shape, self._dtype, self._grad = x.shape, x.dtype, _grad_enabled()
            self.left = _CALLS


def _captures(x: Tensor) -> bool:
    """In a CUDA graph every call is worth fusing."""
    return x.is_cuda and _is_current_stream_capturing()
