"""The kinds of a fused model's calls. Calls of kinds that gain nothing run the original model, without Dynamo.

A kind gains nothing if nothing is fused in its graphs, or if the fused graph was measured to be slower (`trials`). Then
finding a graph and checking its guards takes the host longer than the calls of modules that the graph saves. If two
different calls have the same kind, the wrong one of two correct forms may run: that costs speed, and may change last
bits. So there are no kinds where equal calls have to give equal bits: with `decide="predict"`, in the deterministic and
the batch-invariant mode, and under `torch.distributed`, where the processes have had different calls.
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
"""The number of calls of a kind that run the original model before one tries a graph again; 0: every call tries a
graph."""
ON_CUDA_ALONE = True
"""Kinds are used for CUDA tensors alone: on a CPU graphs are no slower than the model."""

PLAIN_IS_FASTER = (
    "at some sizes the original model was measured to be faster, and calls of these sizes run it"
)

_MOST = 1024
# The number of a container's values, and the depth of nested containers, that are part of a kind.
_FIRST, _DEEP = 2, 3
_has_function_mode = torch._C._is_torch_function_mode_enabled
_world = getattr(getattr(torch.distributed, "distributed_c10d", None), "_world", None)

Asked: TypeAlias = "int | None"
"""What is known of a call. True: it runs the original model. A number: its kind, and a graph is to be tried. None: it
has no kind. False: its caller and the function modes have to be checked first."""


def _not_asked(about: object, is_known: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    return None if is_known else False


# A kind depends on each tensor's type, and on its sizes between powers of two, because sequences grow from call to
# call. Numbers are ignored, because they often count steps or positions. Only the first values of a container count: a
# cache with two tensors for each layer has many similar ones.
# Without the C++ module there are no kinds.
asked: Callable[[Any, bool, tuple[Any, ...], dict[str, Any]], Asked] = getattr(
    _native.entry, "kind", _not_asked
)
"""Returns what is known of a call, from `Kinds.about`, whether its caller and the function modes were checked, and its
arguments. It takes the host a microsecond, and counts the calls that run the original model."""


def _as_it_was(about: object, is_known: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """Traced by Dynamo in place of `asked`: compiling a fused model compiles the original model."""
    return True


if asked is not _not_asked:
    torch.compiler.substitute_in_graph(asked, skip_signature_check=True)(_as_it_was)


class Ran:
    """Counts the graphs of a model that ran.

    Attributes:
        gains: graphs with fused calls, or replayed graphs.
        unsure: graphs for which it is not sure that they are faster.
    """

    gains = unsure = 0


class Kinds:
    """The kinds of one model's calls, and what is known of them.

    `notes`: the notes of its report. `own`: a list in the model's `__dict__`. If another `__dict__` has the same list,
    it belongs to a shallow copy, and then each call's caller is checked. `measures`: whether calls may run in two
    forms whose bits differ; without it no call has a kind.

    Attributes:
        about: the first argument of `asked`; None: callers cannot be checked any more.
    """

    _about: tuple[Any, ...]
    about: tuple[Any, ...] | None

    def __init__(
        self, model: nn.Module, notes: list[str], own: list[str] | None = None, *, measures: bool = True
    ) -> None:
        self._model = model
        self._measures = measures
        owners = (module._parameters for module in model.modules())
        self._parameters, self._name = next(((own, name) for own in owners for name in own), ({}, ""))
        self._notes = notes
        self._left: dict[int, int] = {}  # by kind, how many more calls run the original model
        self._trials: dict[int, Trial] = {}
        self._is_faster = set[int]()  # kinds whose fused form was measured to be faster
        self._is_sure = set[int]()  # kinds of which a call ran a graph that is sure to be faster
        self._know(own)

    def _know(self, own: list[str] | None) -> None:
        """Build what `asked` reads at each call. Nothing else may hold a reference to the list."""
        within = self._parameters, self._name, watchers, self._left, _world, _FIRST, _DEEP, ON_CUDA_ALONE
        self._about = self._model, None, *within
        self.about = (self._model, own, *within) if self._has_kinds() and own is not None else None

    def _has_kinds(self) -> bool:
        return self._measures and CALLS > 0

    def part(self) -> None:
        """Called when the list does not belong to the model any more."""
        self._know(None)

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], about: tuple[Any, ...] | None = None
    ) -> Asked:
        """What is known of a call that the model itself makes; `about`: in place of the usual one."""
        if not self._has_kinds():
            return None
        about = about or self._about
        if not _has_function_mode():
            return asked(about, True, args, kwargs)
        if sees_functions():
            return None
        # A default device is a function mode, which would intercept and slow down every access to a tensor.
        with torch._C.DisableTorchFunction():
            return asked(about, True, args, kwargs)

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        """The kind of a call that is explained. It is not counted, and it has a kind although someone watches."""
        nobody_watches, nothing_left = list[str](), dict[int, int]()
        return self.of(args, kwargs, (*self._about[:4], nobody_watches, nothing_left, *self._about[6:]))

    def why_plain(self, kind: Asked) -> str:
        """Why calls of this kind run the original model; empty if they do not, or if it is not known yet."""
        if not kind or not self._left.get(kind):
            return ""
        return PLAIN_IS_FASTER if PLAIN_IS_FASTER in self._notes else "nothing is fused in calls of this kind"

    def note_sure(self, kind: int) -> None:
        """Note that a call of this kind ran a graph that is sure to be faster."""
        if len(self._is_sure) < _MOST:
            self._is_sure.add(kind)

    def note(self, kind: int, *, gains: bool) -> None:
        """Note that a call of this kind ran nothing fused, or a graph that is not sure to be faster.

        Where other calls of the kind gain, all use their graphs: an attribute of the model may tell them apart.
        """
        if not gains:
            if kind not in self._is_faster and kind not in self._is_sure:
                _add(self._left, kind, CALLS)
        elif not any(kind in each for each in (self._is_faster, self._trials, self._left)):
            _add(self._trials, kind, Trial((kind & 0xFF) - 1))

    def trial(self, kind: int) -> Trial | None:
        """The trial to which a call of this kind belongs, if there is one."""
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
