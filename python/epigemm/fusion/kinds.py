"""Kinds of calls of a fused model in whose graphs nothing is fused: they run as they were, without Dynamo.

To find a graph and to check its guards takes the host longer than the calls of modules that the graph spares. What runs
instead is the model itself, so a kind that is told apart too coarsely costs speed, never a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.arguments import precision

CALLS = 1000
"""So many calls of a kind run as they were, before it is asked again; 0: each call looks for a graph."""
ON_CUDA_ALONE = True
"""On a CPU a graph's calls are no slower than the model's."""

_MOST = 1024
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled


class Kinds:
    """What is known of the kinds of calls of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._left: dict[Any, int] = {}  # by kind, the calls that run as they were, until it is asked again

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls that have the same graphs, as far as it is seen in microseconds; None: it is not asked."""
        if not CALLS:
            return None
        seen: list[Any] = []
        is_cuda = _note(args, seen)
        if kwargs:
            is_cuda |= _note(kwargs.values(), seen)
        if ON_CUDA_ALONE and not is_cuda:
            return None
        autocast = torch.get_autocast_dtype("cuda") if _any_autocast() else None
        modes = _grad_enabled(), _inference(), autocast, self._model.training, precision.torch_setting("cuda")
        return (*modes, *seen)

    def gains_nothing(self, kind: Any) -> bool:
        """Whether a call of this kind runs as it was."""
        left = self._left.get(kind)
        if left is None:
            return False
        if left:
            self._left[kind] = left - 1
            return True
        self._left.pop(kind, None)
        return False

    def note(self, kind: Any) -> None:
        """In a call of this kind nothing ran fused."""
        if len(self._left) < _MOST:
            self._left[kind] = CALLS


def _note(values: Iterable[Any], seen: list[Any]) -> bool:
    """Add what tells values apart; whether there is a tensor on a GPU among them.

    Of a tensor the shape and type. Numbers are left out, which count steps or positions.
    """
    is_cuda = False
    for value in values:
        if type(value) is Tensor:  # of other types, which may see what is asked of them, none is fused
            seen += (None if value.is_nested else value.shape, value.dtype, value.requires_grad)
            is_cuda |= value.is_cuda
        elif value is None or isinstance(value, (bool, str)):
            seen.append(value)
        elif isinstance(value, (list, tuple)):
            is_cuda |= _note(value, seen)
        elif isinstance(value, dict):
            is_cuda |= _note(value.values(), seen)
        else:
            seen.append(type(value))
    return is_cuda
