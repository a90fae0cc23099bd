"""torch where its own annotations are missing: the same module and methods, as Any."""

from __future__ import annotations

from typing import Any

import torch as _torch

torch: Any = _torch
backends: Any = _torch.backends


def backward(output: Any, upstream: _torch.Tensor | None = None, **options: Any) -> None:
    """`output.backward(upstream)`."""
    output.backward(upstream, **options)
