"""Whether a product is large enough for a fused call to pay, where Python launches every kernel.

A fused call costs the host some ten microseconds more than the operators that it replaces, and about a hundred where
autograd records it (its derivative is written in Python). A device that works longer than that on the product hides
it. Graphs hide it always: calls that `torch.compile` traces or a CUDA graph captures are all fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST: dict[tuple[str, bool, bool], int] = {
    ("cuda", False, False): 2**26,
    ("cuda", False, True): 2**28,
    ("cuda", True, False): 2**31,
    ("cuda", True, True): 2**33,
    ("cpu", False, False): 2**20,
    ("cpu", False, True): 2**20,
    ("cpu", True, False): 2**24,
    ("cpu", True, True): 2**24,
}
"""The least M * N * K that is fused: by device, whether autograd records the call, whether elements have 16 bits."""

_PLAIN = (Tensor, torch.nn.Parameter)
TOO_SMALL = "the product is so small that the host's time decides"


def why_not(x: Tensor, weight: Tensor) -> str:
    """Why this call is not worth fusing; empty where it is."""
    if type(x) not in _PLAIN or torch.compiler.is_compiling():  # fake tensors: a graph is being made
        return ""
    recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    columns = weight.numel() // max(1, x.shape[-1])
    key = (x.device.type, recorded, x.element_size() == 2)
    if x.numel() * columns >= SMALLEST.get(key, 0):
        return ""
    return "" if x.is_cuda and torch.cuda.is_current_stream_capturing() else TOO_SMALL
