"""BatchNorm by the batch's own statistics behind a linear layer, in three passes over the result.

The first is the product's, which also gives the mean and the variance of each column. The second normalises, and
applies a ReLU. (PyTorch's BatchNorm reads the product once more.) The functions here make a call, or return None if
they do not: PyTorch's operators compute it then, and raise the errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epigemm import route as _route
from epigemm.arguments import checks, invariance
from epigemm.arguments.precision import DEFAULT
from epigemm.autograd import batch_norm as _nodes
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls import elementwise_kernels, entry
from epigemm.calls.batch_norm import NOTHING_RUNS, Running
from epigemm.calls.log import current
from epigemm.compilers import is_traced
from epigemm.epilogues.registry import compute_dtype
from epigemm.packs import weight_packs

_has_global_hooks: Any = nn.modules.module._has_any_global_hook
_any_autocast = torch._C._is_any_autocast_enabled


class Vectors(NamedTuple):
    """What follows the product and its bias, `[N]` or None: y = batch_norm(u * scale) * weight + bias."""

    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def of_module(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    bn: nn.BatchNorm1d,
    *,
    relu: bool,
    precision: str | None,
    strict: bool,
    pack_use: str,
) -> Tensor | None:
    """bn((x @ weight.T + bias) * scale), and perhaps its ReLU, if `bn` is a plain layer; its buffers are updated."""
    if is_traced():
        return None
    is_plain = _is_plain(bn)
    if not is_plain and current.log is None:
        return None
    vectors = Vectors(scale, bn.weight, bn.bias)
    asked = DEFAULT if precision is None else checks.precision(precision)
    call = BatchNormCall(_running_of(bn), bn.eps, relu, asked, pack_use, strict)
    if not is_plain and current.log is not None:
        current.log.note(linear_batch_norm, call, vectors, _CHANGED)
        return None
    return linear_batch_norm(x, weight, bias, vectors, call)


def linear_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Vectors, call: BatchNormCall
) -> Tensor | None:
    """batch_norm((x @ weight.T + bias) * scale), and perhaps its ReLU."""
    if not isinstance(x, Tensor):
        return None
    why, route, inputs = _why_not_here(x, vectors.scale), None, (x, weight, bias, *vectors)
    if not why:
        x, weight, (bias,) = _route.autocast(x, weight, bias)
        inputs = (x, weight, bias, *vectors)
        route = entry.sees(*inputs, call.running.mean, call.running.var)
        if route is entry.NOT_PLAIN:
            return None
        why = "" if _fits(inputs, call) else _DOES_NOT_FIT
    if why:
        if current.log is not None:
            current.log.note(linear_batch_norm, call, vectors, why)
        return None
    if route is entry.RECORDED and weight.requires_grad:
        call = call._replace(pack_use=weight_packs.NONE)
    checks.flag("strict", call.strict)
    if not _any_autocast():
        return _run(inputs, call, is_recorded=route is entry.RECORDED)
    with torch.autocast(x.device.type, enabled=False):  # its casts have been made
        return _run(inputs, call, is_recorded=route is entry.RECORDED)


def is_served(x: Tensor) -> bool:
    """Whether the kernels run on x's device. On a CPU PyTorch's BatchNorm is one operator."""
    return elementwise_kernels.has_native(x)


_DOES_NOT_FIT = "epigemm's kernels for batch statistics do not take these shapes, types or options"
_CHANGED = "the BatchNorm has hooks or a forward of its own, or is a subclass"


def _why_not_here(x: Tensor, scale: Tensor | None) -> str:
    """Why PyTorch's BatchNorm runs, whatever the other tensors are; empty if it does not."""
    if not is_served(x):
        return f"epigemm has no kernels for batch statistics on {x.device}"
    if invariance.active and invariance.enabled():
        return "in the batch-invariant mode"
    if _any_autocast() and _route.promotes(x, (scale,)):
        return "under autocast a float32 scale makes its input float32"
    return ""


def _run(inputs: _nodes.Inputs, call: BatchNormCall, *, is_recorded: bool) -> Tensor:
    return _nodes.linear_batch_norm(call, inputs) if is_recorded else _nodes.forward(call, inputs)[0]


def _is_plain(bn: nn.BatchNorm1d) -> bool:
    """Whether a call of the layer runs `nn.BatchNorm1d.forward` alone, with the batch's own statistics."""
    hooks = bn._forward_hooks or bn._forward_pre_hooks or bn._backward_hooks or bn._backward_pre_hooks
    changed = "forward" in bn.__dict__ or bn.__dict__.get("_compiled_call_impl") is not None
    if type(bn) is not nn.BatchNorm1d or hooks or changed or _has_global_hooks():
        return False
    return bn.training or (bn.running_mean is None and bn.running_var is None)


def _running_of(bn: nn.BatchNorm1d) -> Running:
    """What `nn.BatchNorm1d.forward` updates."""
    if not bn.training or not bn.track_running_stats:
        return NOTHING_RUNS
    tracked: Tensor | None = bn.num_batches_tracked
    momentum = 0.0 if bn.momentum is None and tracked is None else bn.momentum
    return Running(bn.running_mean, bn.running_var, tracked, momentum)


def _fits(inputs: _nodes.Inputs, call: BatchNormCall) -> bool:
    """Whether the kernels compute what PyTorch does. Where it raises an error, they do not."""
    x, weight, bias, scale, *of_norm = inputs
    running = call.running
    if not call.eps > 0:
        return False
    if x.dim() != 2 or weight.dim() != 2 or x.shape[0] < 2 or weight.numel() == 0:
        return False
    if weight.shape[1] != x.shape[1] or weight.dtype is not x.dtype or weight.device != x.device:
        return False
    kept = [each for each in (running.mean, running.var) if each is not None]
    if len(kept) == 1 or any(each.requires_grad for each in kept) or not _counts(running, x.device):
        return False
    # As torch's BatchNorm: all of one type, x's or that of the arithmetic.
    vectors = [*kept, *(each for each in of_norm if each is not None)]
    if len({each.dtype for each in vectors}) > 1:
        return False
    wide, columns = compute_dtype(x.dtype), (weight.shape[0],)
    vectors += [each for each in (scale, bias) if each is not None]
    # The kernel that writes the running statistics reads the other vectors.
    if kept and len({each.data_ptr() for each in vectors}) < len(vectors):
        return False
    return (bias is None or bias.dtype is x.dtype) and all(
        each.shape == columns and each.device == x.device and each.dtype in (x.dtype, wide)
        for each in vectors
    )


def _counts(running: Running, device: torch.device) -> bool:
    """Whether the number of batches is as `nn.BatchNorm1d` makes it, and the momentum a number."""
    tracked, momentum = running.tracked, running.momentum
    if tracked is not None and (
        type(tracked) is not Tensor
        or tracked.dtype is not torch.int64
        or tracked.dim()
        or tracked.device != device
    ):
        return False
    return momentum is None or isinstance(momentum, int | float)
