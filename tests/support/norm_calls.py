"""BatchNorm by the batch's own statistics in epigemm's passes, on a CPU: the kernels by PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.calls.batch_norm import Norm
from tests.support.pretended import serve_statistics as pretended

__all__ = ["counted", "pretended"]

_calls: list[int] = []


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same, and a number for each call of them from now on."""
    pretended(monkeypatch)
    _calls.clear()
    return _calls


def _slope(mean: Tensor, var: Tensor, norm: Norm) -> tuple[Tensor, ...]:
    """1 / sqrt(scale^2 * var + eps); scale, weight and bias, which may be absent."""
    scale, weight, bias = (
        torch.full_like(mean, absent) if vector is None else vector.to(mean.dtype)
        for vector, absent in zip(norm[:3], (1.0, 1.0, 0.0), strict=True)
    )
    return torch.rsqrt(scale * scale * var + norm.eps), scale, weight, bias


def _out(u: Tensor, mean: Tensor, var: Tensor, *rest: Any) -> None:
    norm, (*running, tracked, momentum, out) = Norm(*rest[:5]), rest[5:10]
    counted = rest[12] if len(rest) > 12 else None  # what has its default is left out
    _calls.append(1)
    inverse, scale, weight, bias = _slope(mean, var, norm)
    y = torch.addcmul(bias, u.to(mean.dtype) - mean, scale * inverse * weight).to(u.dtype)
    out.copy_(torch.relu(y) if norm.relu else y)
    if counted is not None:
        counted.data.add_(1)
    factor = momentum if tracked is None else 1.0 / tracked.to(mean.dtype)
    new = (mean * scale, var * scale * scale * len(u) / (len(u) - 1))
    for kept, value in zip(running, new, strict=True):
        if kept is not None:
            kept.data.copy_(kept.to(mean.dtype) * (1 - factor) + value * factor)


def _backward_out(grad: Tensor, u: Tensor, mean: Tensor, var: Tensor, *rest: Any) -> None:
    norm, (*results, _) = Norm(*rest[:5]), rest[5:]
    inverse, scale, weight, bias = _slope(mean, var, norm)
    centred, t, wide = u.to(mean.dtype) - mean, scale * inverse, grad.to(mean.dtype)
    if norm.relu:
        wide = torch.where(torch.addcmul(bias, centred, t * weight).to(u.dtype) <= 0, 0.0, wide)
    total, by_centred = wide.sum(0), (wide * centred).sum(0)
    gradients = (
        t * weight * (wide - total / len(u) - centred * (t * t * by_centred / len(u))),
        weight * by_centred * (norm.eps * inverse * inverse * inverse),
        t * by_centred,
        total,
        total - total,  # NaN where a sum is not finite
    )
    for result, gradient in zip(results, gradients, strict=True):
        if result is not None:
            result.copy_(gradient)


_library = torch.library.Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]
_library.impl("_batch_norm_out", _out, "CPU")  # type: ignore[no-untyped-call]
_library.impl("_batch_norm_backward_out", _backward_out, "CPU")  # type: ignore[no-untyped-call]
