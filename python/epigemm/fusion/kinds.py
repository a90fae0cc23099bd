"""Kinds of calls of a fused model that gain nothing: they run as they were, without Dynamo.

Nothing is fused in their graphs, or it was measured to be slower (`trials`). To find a graph and to check its guards
takes the host longer than the calls of modules that the graph spares. What runs instead is the model itself, so a kind
that is told apart too coarsely costs speed, never a number. It may cost bits: where equal calls have to give equal
ones there are no kinds, or sizes are told apart exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.arguments import precision
from epigemm.fusion.changes import sees_functions
from epigemm.fusion.trials import Trial, is_distributed, may_measure, wants_same_bits

CALLS = 1000
"""So many calls of a kind run as they were, before it is asked again; 0: each call looks for a graph."""
ON_CUDA_ALONE = True
"""On a CPU a graph's calls are no slower than the model's."""

PLAIN_IS_FASTER = "at some sizes the model itself was measured to be faster, and runs in their calls"

_MOST = 1024
_FIRST, _DEEP = 2, 3  # so many values of a container, and containers inside of each other, tell kinds apart
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_tracing_state = torch._C._get_tracing_state
_has_function_mode = torch._C._is_torch_function_mode_enabled


class Ran:
    """Counts the graphs of a model that ran.

    Attributes:
        gains: those that ran otherwise than the model, with fused calls or replayed.
        unsure: those of which no estimate is sure.
    """

    gains = unsure = 0


class Kinds:
    """What is known of the kinds of calls of one model.

    `notes` are those of its report. `is_exact`: each size is a kind, so that what decides is what was predicted for it.
    """

    def __init__(self, model: nn.Module, notes: list[str], *, is_exact: bool = False) -> None:
        self._model = model
        self._is_exact = is_exact
        owners = (module._parameters for module in model.modules())
        self._parameters, self._name = next(((own, name) for own in owners for name in own), ({}, ""))
        self._notes = notes
        self._left: dict[Any, int] = {}  # by kind, the calls that run as they were, until it is asked again
        self._trials: dict[Any, Trial] = {}
        self._is_faster: set[Any] = set()  # kinds whose fused form was measured to be

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls that have the same graphs, as far as it is seen in microseconds; None: it is not asked."""
        # Under torch.jit.trace sizes are tensors.
        if not CALLS or wants_same_bits() or _tracing_state() is not None:
            return None
        seen: list[Any] = []
        if not _has_function_mode():
            device = self._note(args, kwargs, seen)
        elif sees_functions():
            return None
        else:  # a default device sees all that is asked of tensors, and takes its time
            with torch._C.DisableTorchFunction():
                device = self._note(args, kwargs, seen)
        if ON_CUDA_ALONE and device < 0:
            return None
        autocast = torch.get_autocast_dtype("cuda") if _any_autocast() else None
        modes = _grad_enabled(), _inference(), autocast, self._model.training, precision.torch_setting("cuda")
        # model.half() changes no token.
        dtype = getattr(self._parameters.get(self._name), "dtype", None)
        return (device, dtype, is_distributed(), *modes, *seen)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: list[Any]) -> int:
        device = _note(args, seen, self._is_exact)
        return max(device, _note(kwargs.values(), seen, self._is_exact)) if kwargs else device

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

    def note(self, kind: Any, *, gains: bool, is_unsure: bool) -> None:
        """How a call of this kind went: whether something ran fused, and whether that was worth it is not sure."""
        if not gains:
            _add(self._left, kind, CALLS)
        elif is_unsure and not any(kind in each for each in (self._is_faster, self._trials, self._left)):
            _add(self._trials, kind, Trial(kind[0]))

    def trial(self, kind: Any) -> Trial | None:
        """The trial that a call of this kind is a turn of."""
        trial = self._trials.get(kind)
        if trial is None or not may_measure():
            return None
        is_plain_faster = trial.is_plain_faster()
        if is_plain_faster is None:
            return trial
        self._trials.pop(kind, None)
        if is_plain_faster:
            _add(self._left, kind, CALLS)
            if PLAIN_IS_FASTER not in self._notes:
                self._notes.append(PLAIN_IS_FASTER)
        elif len(self._is_faster) < _MOST:
            self._is_faster.add(kind)
        return None


def _add(found: dict[Any, Any], kind: Any, value: Any) -> None:
    if len(found) < _MOST or kind in found:
        found[kind] = value


def _note(values: Iterable[Any], seen: list[Any], is_exact: bool, deep: int = _DEEP) -> int:
    """Add what tells values apart; the highest index of a GPU with a tensor among them, -1 where there is none.

    Of a tensor the type, and its size by powers of two: sequences grow call by call. Numbers are left out, which count
    steps or positions. The first values of a container stand for all: one with two tensors a layer has many alike.
    """
    device = -1
    first = None if is_exact else _FIRST
    for value in values:
        if type(value) is Tensor:  # of other types, which may see what is asked of them, none is fused
            if value.is_nested:
                size: Any = None
            else:
                size = value.shape if is_exact else (value.dim(), value.numel().bit_length())
            place = value.get_device()
            seen += (size, value.dtype, value.requires_grad, place)
            device = max(device, place)
        elif value is None or isinstance(value, (bool, str)):
            seen.append(value)
        elif deep and isinstance(value, (list, tuple)):
            device = max(device, _note(islice(value, first), seen, is_exact, deep - 1))
        elif deep and isinstance(value, dict):
            device = max(device, _note(islice(value.values(), first), seen, is_exact, deep - 1))
        else:
            seen.append(type(value))
    return device
