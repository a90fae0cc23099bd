"""Calls of a site that are like its last one that ran fused: what was found out about that one holds for them, too.

To find it out takes the host longer than to launch the kernels. All of it depends on what is compared here: the
tensors' sizes, types and places, torch's modes, and the settings that the worth of a call depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from epigemm import execution, invariance, plans
from epigemm import precision as _precision

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack


class Repeat:
    """The last call of one site that ran fused on a GPU.

    Threads share a site: what is known is one object, put there at once.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], str] | None = None

    def remember(self, operands: Sequence[Any]) -> None:
        """A call on these operands, plain tensors, numbers and None, x first, ran fused."""
        x, grad = operands[0], _grad_enabled()
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()  # in graphs more is worth fusing
        if _is_seen() or capturing or not plans.has_gpu_kernels(x):
            self._known = None
            return
        facts = tuple(
            _facts(operand, grad) if isinstance(operand, Tensor) else operand for operand in operands
        )
        self._known = facts, _precision.torch_setting("cuda")

    def holds(self, operands: Sequence[Any]) -> bool:
        """Whether a call on these operands is alike, so that it may run fused without another look."""
        known = self._known
        if known is None or _is_seen():
            return False
        remembered, setting = known
        if _precision.torch_setting("cuda") != setting:
            return False
        grad = _grad_enabled()
        for operand, facts in zip(operands, remembered, strict=True):
            kind = type(operand)
            if kind is Tensor or kind is Parameter:
                if type(facts) is not tuple:
                    return False
                # As `_facts`, but nothing is made, and the first difference ends it.
                shape, dtype, device, layout, needs_gradient = facts
                if (
                    operand.is_nested
                    or operand.shape != shape
                    or operand.dtype is not dtype
                    or operand.device != device
                    or operand.layout is not layout
                    or (grad and operand.requires_grad) is not needs_gradient
                ):
                    return False
            elif kind is not type(facts) or operand != facts:
                return False
        return True


def _facts(tensor: Tensor, grad: bool) -> tuple[Any, ...]:
    """What decides about a call on a tensor."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, grad and tensor.requires_grad


def _is_seen() -> bool:
    """Whether something between Python and the kernels may have to do with a call: then it is looked at closely."""
    return (
        _any_autocast()
        or _has_function_mode()
        or bool(_dispatch_modes())
        or _functorch_interpreter() is not None
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or invariance.active
        or execution.on_first_call is not None
    )


__all__ = ["Repeat"]
