"""Kinds of calls of a fused model that gain nothing: they run as they were, without Dynamo.

Nothing is fused in their graphs, or it was measured to be slower (`trials`). To find a graph and to check its guards
takes the host longer than the calls of modules that the graph spares. What runs instead is the model itself, so a kind
that is told apart too coarsely costs speed, never a number. It may cost bits: where equal calls have to give equal
ones there are no kinds, or sizes are told apart exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from epigemm import _native
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
_fp32_setting = precision.torch_setting
_tracing_state = torch._C._get_tracing_state
_has_function_mode = torch._C._is_torch_function_mode_enabled
# What tells arguments apart. Of a tensor the type, and its size by powers of two: sequences grow call by call. Numbers
# are left out, which count steps or positions, unless kinds are exact: one may be a size. The first values of a
# container stand for all: one with two tensors a layer has many alike. None: the module is missing, and there are no
# kinds.
_kind: Callable[..., bytes] | None = getattr(_native.entry, "kind", None)


class Ran:
    """Counts the graphs of a model that ran.

    Attributes:
        gains: those that ran otherwise than the model, with fused calls or replayed.
        unsure: those of which no estimate is sure.
    """

    gains = unsure = 0


class Kinds:
    """What is known of the kinds of calls of one model.

    `notes` are those of its report. `is_exact`: each size and number is a kind, so that what decides is what was
    predicted for it.
    """

    def __init__(self, model: nn.Module, notes: list[str], *, is_exact: bool = False) -> None:
        self._model = model
        self._first = -1 if is_exact else _FIRST
        owners = (module._parameters for module in model.modules())
        self._parameters, self._name = next(((own, name) for own in owners for name in own), ({}, ""))
        self._notes = notes
        self._left: dict[bytes, int] = {}  # by kind, the calls that run as they were, until it is asked again
        self._trials: dict[bytes, Trial] = {}
        self._has_trials = False  # or had
        self._is_faster = set[bytes]()  # kinds whose fused form was measured to be

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
        """Equal for calls that have the same graphs, as far as it is seen in a microsecond; None: it is not asked."""
        # Under torch.jit.trace sizes are tensors.
        if not CALLS or _kind is None or _tracing_state() is not None or wants_same_bits():
            return None
        if _has_function_mode():  # a default device sees all that is asked of tensors, and takes its time
            if sees_functions():
                return None
            with torch._C.DisableTorchFunction():
                return self.of(args, kwargs)
        modes = (
            getattr(self._parameters.get(self._name), "dtype", None),  # model.half() changes no token
            self._model.training,
            _grad_enabled(),
            _inference(),
            torch.get_autocast_dtype("cuda") if _any_autocast() else None,
            _fp32_setting("cuda"),  # the caller's, also while another thread has switched it
            self._has_trials and is_distributed(),  # what one process has measured is nothing to several
        )
        kind = _kind(args, kwargs, modes, self._first, _DEEP)
        return None if ON_CUDA_ALONE and not kind[0] else kind

    def gains_nothing(self, kind: bytes) -> bool:
        """Whether a call of this kind runs as it was."""
        left = self._left.get(kind)
        if left is None:
            return False
        if left:
            self._left[kind] = left - 1
            return True
        self._left.pop(kind, None)
        return False

    def why_plain(self, kind: bytes | None) -> str:
        """Why calls of this kind run as they were; empty where they do not, or it is not known yet."""
        if kind is None or not self._left.get(kind):
            return ""
        return PLAIN_IS_FASTER if PLAIN_IS_FASTER in self._notes else "nothing is fused in calls of this kind"

    def note(self, kind: bytes, *, gains: bool) -> None:
        """A call of this kind ran nothing fused, or something of which it is not sure that it was worth it."""
        if not gains:
            _add(self._left, kind, CALLS)
        elif not any(kind in each for each in (self._is_faster, self._trials, self._left)):
            _add(self._trials, kind, Trial(kind[0] - 1))
            self._has_trials = True

    def trial(self, kind: bytes) -> Trial | None:
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


def _add(found: dict[bytes, Any], kind: bytes, value: Any) -> None:
    if len(found) < _MOST or kind in found:
        found[kind] = value
