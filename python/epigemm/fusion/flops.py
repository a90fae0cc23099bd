"""The floating-point operations of the operators that a node runs, by the formulas of PyTorch's own FLOP counter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from epigemm.fusion.values import hint

CONVOLUTIONS = ("convolution", "conv2d_forward")
"""Parts of the names of convolutions, for which TF32 has a setting of its own."""


def flops_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The operations of one call of an operator, at the sizes of the call that is being compiled.

    0 if there is no formula: then the time is estimated by the bytes. No guards are added.
    """
    packet = getattr(function, "_overloadpacket", None)
    formula: Callable[..., Any] | None = flop_registry.get(packet)
    if formula is None:
        is_grouped = "grouped_mm" in str(packet)
        return _of_grouped(tree_leaves((list(args), dict(kwargs)))) if is_grouped else 0
    given, named, found = tree_map(_without_data, (tuple(args), dict(kwargs), result))
    try:
        return int(formula(*given, **named, out_val=found))
    except Exception:  # a formula that reads data, as for sequences of several lengths
        return 0


def dtype_of(args: Sequence[Any]) -> torch.dtype | None:
    """The type of the first tensor that an operator reads, in which it multiplies."""
    return next((value.dtype for value in tree_leaves(list(args)) if isinstance(value, Tensor)), None)


def _of_grouped(values: Sequence[Any]) -> int:
    """FLOPs of grouped or batched products: each element of x is multiplied with each column.

    PyTorch has no formula. `[M, K] x [G, K, N]`, `[G, M, K] x [K, N]` (groups of columns), `[M, K] x [K, N]` (groups of
    K) and `[G, M, K] x [G, K, N]`.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < 2 or min(tensor.dim() for tensor in tensors[:2]) < 2:
        return 0
    x, weight = ([hint(size) for size in tensor.shape] for tensor in tensors[:2])
    batches = x[0] if len(x) == 3 and len(weight) == 3 else 1
    return 2 * batches * x[-2] * x[-1] * weight[-1]


def _without_data(value: Any) -> Any:
    """A tensor with the present sizes in place of one that may have symbolic sizes; numbers unchanged."""
    if isinstance(value, Tensor):
        return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return hint(value) if isinstance(value, torch.SymInt) else value
