"""Kinds of calls of a fused model that gain nothing: they run as they were, without Dynamo.

Nothing is fused in their graphs, or it was measured to be slower (`trials`). To find a graph and to check its guards
takes the host longer than the calls of modules that the graph spares. What runs instead is the model itself, so a kind
that is told apart too coarsely costs speed, never a number. It may cost bits: where equal calls have to give equal
ones there are no kinds, or sizes are told apart exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from epigemm import _native
from epigemm.fusion.changes import sees_functions
from epigemm.fusion.report import watchers
from epigemm.fusion.trials import Trial, may_measure

CALLS = 1000
"""So many calls of a kind run as they were, before it is asked again; 0: each call looks for a graph."""
ON_CUDA_ALONE = True
"""On a CPU a graph's calls are no slower than the model's."""

PLAIN_IS_FASTER = "at some sizes the model itself was measured to be faster, and runs in their calls"

_MOST = 1024
_FIRST, _DEEP = 2, 3  # so many values of a container, and containers inside of each other, tell kinds apart
_has_function_mode = torch._C._is_torch_function_mode_enabled
_world = getattr(getattr(torch.distributed, "distributed_c10d", None), "_world", None)

Asked: TypeAlias = "int | None"
"""What is known of a call. True: it runs as it was. A number: its kind, of which no call is left. None: it has none.
False: its caller and the function modes have to be looked at first."""


def _not_asked(about: object, is_known: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    return None if is_known else False


# What tells arguments apart. Of a tensor the type, and its size by powers of two: sequences grow call by call. Numbers
# are left out, which count steps or positions, unless kinds are exact: one may be a size. The first values of a
# container stand for all: one with two tensors a layer has many alike. Without the module there are no kinds.
asked: Callable[[Any, bool, tuple[Any, ...], dict[str, Any]], Asked] = getattr(
    _native.entry, "kind", _not_asked
)
"""Asks what is known of a call: with `Kinds.about`, whether its caller and the function modes were looked at, and its
arguments. It takes the host a microsecond, and counts the calls that run as they were."""


def _as_it_was(about: object, is_known: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """What Dynamo traces in the place of `asked`: whoever compiles a fused model compiles the model."""
    return True


if asked is not _not_asked:
    torch.compiler.substitute_in_graph(asked, skip_signature_check=True)(_as_it_was)


class Ran:
    """Counts the graphs of a model that ran.

    Attributes:
        gains: those that ran otherwise than the model, with fused calls or replayed.
        unsure: those of which no estimate is sure.
    """

    gains = unsure = 0


class Kinds:
    """What is known of the kinds of calls of one model.

    `notes` are those of its report. `own`: a list that the model's `__dict__` holds: another `__dict__` that holds it,
    too, belongs to a shallow copy, and its calls are looked at one by one. `is_exact`: each size and number is a kind,
    so that what decides is what was predicted for it.

    Attributes:
        about: what `asked` has to know; None: nothing is known of callers any more.
    """

    _about: tuple[Any, ...]
    about: tuple[Any, ...] | None

    def __init__(
        self, model: nn.Module, notes: list[str], own: list[str] | None = None, *, is_exact: bool = False
    ) -> None:
        self._model = model
        self._first = -1 if is_exact else _FIRST
        owners = (module._parameters for module in model.modules())
        self._parameters, self._name = next(((own, name) for own in owners for name in own), ({}, ""))
        self._notes = notes
        self._left: dict[int, int] = {}  # by kind, the calls that run as they were, until it is asked again
        self._trials: dict[int, Trial] = {}
        self._has_trials = False  # or had
        self._is_faster = set[int]()  # kinds whose fused form was measured to be
        self._know(own)

    def _know(self, own: list[str] | None) -> None:
        """Keep what `asked` reads at each call. Nothing else here may hold the list."""
        world = _world if self._has_trials else None  # what one process has measured is nothing to several
        within = self._parameters, self._name, watchers, self._left, world, self._first, _DEEP, ON_CUDA_ALONE
        self._about = self._model, None, *within
        self.about = (self._model, own, *within) if CALLS and own is not None else None

    def part(self) -> None:
        """The list is the model's no more."""
        self._know(None)

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], about: tuple[Any, ...] | None = None
    ) -> Asked:
        """What is known of a call whose caller is the model; `about`: in place of what is known."""
        if not CALLS:
            return None
        about = about or self._about
        if not _has_function_mode():
            return asked(about, True, args, kwargs)
        if sees_functions():
            return None
        # A default device sees all that is asked of tensors, and takes its time.
        with torch._C.DisableTorchFunction():
            return asked(about, True, args, kwargs)

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        """The kind of a call that is explained: it is not counted, and those that watch it are no reason for none."""
        nobody_watches, nothing_left = list[str](), dict[int, int]()
        return self.of(args, kwargs, (*self._about[:4], nobody_watches, nothing_left, *self._about[6:]))

    def why_plain(self, kind: Asked) -> str:
        """Why calls of this kind run as they were; empty where they do not, or it is not known yet."""
        if not kind or not self._left.get(kind):
            return ""
        return PLAIN_IS_FASTER if PLAIN_IS_FASTER in self._notes else "nothing is fused in calls of this kind"

    def note(self, kind: int, *, gains: bool) -> None:
        """A call of this kind ran nothing fused, or something of which it is not sure that it was worth it."""
        if not gains:
            _add(self._left, kind, CALLS)
        elif not any(kind in each for each in (self._is_faster, self._trials, self._left)):
            _add(self._trials, kind, Trial((kind & 0xFF) - 1))
            if not self._has_trials:
                self._has_trials = True
                self._know(None if self.about is None else self.about[1])

    def trial(self, kind: int) -> Trial | None:
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


def _add(found: dict[int, Any], kind: int, value: Any) -> None:
    if len(found) < _MOST or kind in found:
        found[kind] = value
