"""Decompositions for the trace, of operators without a primitive: torch's core ATen ones, and a few of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epigemm.epilogues.tracing.steps import KEPT


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """For `make_fx`: by overload."""
    from torch._decomp import (
        core_aten_decompositions,
    )  # takes seconds to import, so only at the first decoration

    aten = torch.ops.aten
    core: Any = core_aten_decompositions()
    table = {
        overload: function
        for overload, function in core.items()
        if overload._schema.name.split("::")[-1] not in KEPT
    }
    ours: dict[Any, Callable[..., Tensor]] = {
        aten.mish.default: lambda x: aten.mul(x, aten.tanh(aten.softplus(x))),
        aten.hardsigmoid.default: lambda x: aten.div(aten.hardtanh(aten.add(x, 3.0), 0.0, 6.0), 6.0),
        aten.hardswish.default: lambda x: aten.div(
            aten.mul(x, aten.hardtanh(aten.add(x, 3.0), 0.0, 6.0)), 6.0
        ),
        aten.celu.default: lambda x, alpha=1.0: aten.elu(x, alpha, 1.0, 1.0 / alpha),
        aten.lerp.Scalar: _lerp,
    }
    table |= {overload: _rounded_once(function) for overload, function in ours.items()}
    # These would read a number that is a symbol. As a factor of a tensor of ones it is not read.
    for overload in (aten.scalar_tensor.default, aten.full.default, aten.full_like.default):
        table[overload] = functools.partial(_fill, overload, table.get(overload))
    return table


def _rounded_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For tensors of 16 bits: computed in fp32 and rounded at the end, as torch's kernels do."""

    def wide(*args: Any) -> Tensor:
        dtype = args[0].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return function(*args)
        to = torch.ops.aten._to_copy
        given = [to(each, dtype=torch.float32) if isinstance(each, Tensor) else each for each in args]
        return to(function(*given), dtype=dtype)  # type: ignore[no-any-return]

    return wide


def _fill(overload: Any, decomposition: Any, *args: Any, **kwargs: Any) -> Any:
    place = 0 if overload is torch.ops.aten.scalar_tensor.default else 1
    if isinstance(args[place], torch.SymFloat):
        ones = overload(*args[:place], 1.0, *args[place + 1 :], **kwargs)
        filled = torch.ops.aten.mul.Tensor(ones, args[place])
        same = filled.dtype == ones.dtype
        return filled if same else torch.ops.aten._to_copy(filled, dtype=ones.dtype)
    return NotImplemented if decomposition is None else decomposition(*args, **kwargs)


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """`lerp`, computed from the nearer end, as torch does."""
    aten = torch.ops.aten
    way = aten.sub(end, start)
    near = aten.add(start, aten.mul(way, weight))
    far = aten.sub(end, aten.mul(way, 1.0 - weight))
    if not isinstance(weight, torch.SymFloat):
        return near if abs(weight) < 0.5 else far  # type: ignore[no-any-return]
    tensor = aten.mul(aten.full_like(start, 1.0), weight)
    return aten.where(aten.lt(aten.abs(tensor), 0.5), near, far)  # type: ignore[no-any-return]
