"""BatchNorm by the batch's own statistics behind a linear layer, in three passes over the result.

The first is the product's, which also gives the mean and the variance of each column. The second normalises, and
applies a ReLU. (PyTorch's BatchNorm reads the product once more.) The functions here make a call, or return None if
they do not: PyTorch's operators compute it then, and raise the errors.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.arguments import autocast, checks, invariance
from epigemm.arguments.calls import LinearCall, Options
from epigemm.arguments.precision import DEFAULT
from epigemm.autograd import batch_norm as _nodes
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls import elementwise_kernels, entry
from epigemm.calls.batch_norm import NOTHING_RUNS, Norm, Running
from epigemm.calls.log import current
from epigemm.compilers import is_traced
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import compute_dtype

_has_global_hooks: Any = nn.modules.module._has_any_global_hook
_any_autocast = autocast.is_any_on
is_served = elementwise_kernels.has_native
"""Whether the kernels run on x's device. On a CPU PyTorch's BatchNorm is one operator."""


def of_module(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    bn: nn.BatchNorm1d,
    options: Options,
    *,
    relu: bool,
) -> Tensor | None:
    """bn((x @ weight.T + bias) * scale), and perhaps its ReLU, if `bn` is a plain layer; its buffers are updated."""
    if is_traced():
        return None
    precision = DEFAULT if options.precision is None else checks.precision(options.precision)
    product = LinearCall(BIAS, x, weight, (bias,), precision, strict=options.strict)
    call = BatchNormCall(product, Norm(scale, bn.weight, bn.bias, bn.eps, relu), _running_of(bn))
    if not _is_plain(bn):
        return _by_torch(call, "the BatchNorm has hooks or a forward of its own, or is a subclass")
    return linear_batch_norm(call)


def linear_batch_norm(call: BatchNormCall) -> Tensor | None:
    """batch_norm((x @ weight.T + bias) * scale), and perhaps its ReLU."""
    product = call.product
    x = product.x
    if not isinstance(x, Tensor):
        return None
    if not is_served(x):
        return _by_torch(call, f"epigemm has no kernels for batch statistics on {x.device}")
    if invariance.active and invariance.enabled():
        return _by_torch(call, "in the batch-invariant mode")
    if _any_autocast() and autocast.promotes(x, call.norm[:1]):
        return _by_torch(call, "under autocast a float32 scale makes its input float32")
    x, weight, biases = autocast.cast(x, product.weight, product.bias)
    call = call._replace(product=product._replace(x=x, weight=weight, operands=biases))
    route = entry.sees(*call.inputs, call.running.mean, call.running.var)
    if route is entry.NOT_PLAIN:
        return None
    if not _fits(call):
        return _by_torch(
            call, "epigemm's kernels for batch statistics do not take these shapes, types or options"
        )
    if route is entry.RECORDED and weight.requires_grad:
        call = call._replace(product=call.product._replace(uses_pack=False))
    checks.flag("strict", product.strict)
    # The casts of autocast have been made.
    with torch.autocast(x.device.type, enabled=False) if _any_autocast() else nullcontext():
        if route is entry.RECORDED:
            return _nodes.linear_batch_norm(call)
        return _nodes.forward(call)[0]


def _by_torch(call: BatchNormCall, why: str) -> Tensor | None:
    """None, because PyTorch's BatchNorm runs behind this product; an open log is told why."""
    if current.log is not None:
        current.log.norm_by_torch(call, why)
    return None


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


def _fits(call: BatchNormCall) -> bool:
    """Whether the kernels compute what PyTorch does. Where it raises an error, they do not."""
    x, weight, bias = call.product.x, call.product.weight, call.product.bias
    (scale, *of_norm), running = call.norm[:3], call.running
    if not call.norm.eps > 0:
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
