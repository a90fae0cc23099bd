"""What autocast makes of a call: the types of the product's inputs, and calls whose result it makes fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.compilers import is_traced
from epigemm.epilogues.registry import Operands

is_any_on = torch._C._is_any_autocast_enabled
"""Whether autocast is on for some kind of device. If not, no other function here changes anything."""
_exists_for = torch.amp.is_autocast_available


def cast(x: Tensor, weight: Tensor, *biases: Any) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The matrix product's inputs in autocast's type, but for fp64; biases have the product's type."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return x, weight, biases  # the checks raise the error
    dtype = dtype_for(x) if is_any_on() else None
    if dtype is None:
        return x, weight, biases
    device_type = x.device.type

    def as_wanted(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != device_type:
            return value
        return value if value.dtype == torch.float64 or not value.is_floating_point() else value.to(dtype)

    return as_wanted(x), as_wanted(weight), tuple([as_wanted(bias) for bias in biases])


def cast_call(
    place: int, x: Tensor, weight: Tensor, operands: Operands, fold: tuple[Any, ...] | None
) -> tuple[Tensor, Tensor, Operands, tuple[Any, ...] | None]:
    """A call's arguments. Beside x and the weight only a bias is cast, an operand or what is folded: as the product.

    `place`: that of the bias among the operands, as of `Epilogue`.
    """
    if fold is not None:
        x, weight, first = cast(x, weight, fold[0])
        return x, weight, operands, (*first, *fold[1:])
    x, weight, bias = cast(x, weight, *operands[place - 1 : place] if place else ())
    return x, weight, (*operands[: place - 1], *bias, *operands[place:]) if place else operands, None


def promotes(x: Tensor, operands: Sequence[Any]) -> bool:
    """Whether autocast is on and an operand beside a product of x is fp32: what PyTorch makes of both is fp32.

    Numbers and 0-d tensors promote nothing. Outside of autocast a result has x's type.
    """
    dtype = dtype_for(x) if isinstance(x, Tensor) else None
    if dtype is None or dtype.itemsize != 2 or x.dtype is torch.float64:
        return False
    return any(isinstance(each, Tensor) and each.dtype is torch.float32 and each.dim() for each in operands)


def refuse_strict(strict: bool) -> None:
    """RuntimeError for a strict call that `promotes`: no kernel stores another type than x's."""
    if checks.flag("strict", strict):
        raise RuntimeError(
            "strict: got True under autocast for a call with a float32 operand, whose result is float32 and no fused "
            "kernel's; accepted there is False, or operands of autocast's dtype"
        )


def dtype_for(x: Tensor) -> torch.dtype | None:
    """The type that autocast gives a product of x, if x is no fp64; None where autocast is off."""
    device_type = x.device.type
    # `is_autocast_enabled` raises for devices without autocast, such as meta. Dynamo of torch 2.11 cannot trace that.
    if not (is_traced() or _exists_for(device_type)) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
