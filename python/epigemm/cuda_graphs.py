"""CUDA graphs: whether one is being captured."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index == torch._C._cuda_getDevice():
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())
