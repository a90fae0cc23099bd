"""Whether a call may run the graphs of a model, and what Dynamo is made to guard beside what it guards by itself.

Dynamo does not look whether functions of torch's or of the model's classes were replaced: a call looks at those whose
names are in the code that was traced. Nor does it guard which objects modules are, what hides their members, and the
sign of zero: `guard_more` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import DictGetItemSource, GetItemSource, NNModuleSource
from torch._guards import Guard, GuardsSet
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from epigemm.functor_program import words

PATCHED = "a function of torch's was replaced"
_code, _order = attrgetter("__code__"), attrgetter("__mro__")
# As they are when epigemm is imported.
_SPACES: dict[Any, dict[str, Any]] = {space: dict(vars(space)) for space in (torch, F, Tensor, nn.Module)}
_CODED = (nn.Linear.forward, F.relu, F.batch_norm, nn.Module._call_impl)
_CODES = [each.__code__ for each in _CODED]
_END = (object(),)  # of a class's members
# What Dynamo wraps itself, when it compiles first.
_OF_DYNAMO = {"__init__", "__setstate__", "manual_seed", "seed"}
# What runs without its name.
_UNNAMED = words(
    "__call__ forward _call_impl _wrapped_call_impl __getattr__ __torch_function__ __add__ __iadd__ __radd__ __sub__ "
    "__isub__ __rsub__ __mul__ __imul__ __rmul__ __truediv__ __itruediv__ __rtruediv__ __matmul__ __rmatmul__ __neg__ "
    "__pow__ __getitem__"
)
# Looked up once: a call is measured in microseconds.
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack


def is_torch_patched() -> bool:
    """Whether somebody put others in the place of torch's functions: all are looked at."""
    for space, was in _SPACES.items():
        now = vars(space)
        for name, value in was.items():
            if callable(value) and name not in _OF_DYNAMO and now.get(name) is not value:
                return True
    if any(name in vars(torch._C.TensorBase) for name in vars(Tensor).keys() - _SPACES[Tensor].keys()):
        return True
    return [each.__code__ for each in _CODED] != _CODES


class Watched:
    """What the graphs of a model were made of: functions of torch's, and the classes of the model's modules.

    All is compared by C loops over names and objects, as every call of the model asks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._types = [
            *{type(module) for module in model.modules()}
        ]  # their orders change with those of their bases
        kinds = {kind for each in self._types for kind in each.__mro__} - {object}
        of_torch = [kind for kind in kinds if kind.__module__.startswith("torch.nn.")]
        self._spaces = dict.fromkeys([*_SPACES, *of_torch])
        own = [vars(kind).values() for kind in kinds if kind not in self._spaces]
        self._members = [each for values in own for each in (values, _END)]
        functions = (value for values in own for value in values if isinstance(value, FunctionType))
        self._coded = [*_CODED, *functions]
        self._was = [*self._objects()]
        self._names = set(_UNNAMED)
        self.note(())

    def note(self, codes: Iterable[CodeType]) -> None:
        """Look also at what has a name in `codes`; nothing may have changed so far."""
        self._names.update(name for code in codes for name in code.co_names)
        self._looks: list[tuple[Callable[[Any], Any], Any, Any]] = []
        for space in self._spaces:
            names = [name for name in self._names - _OF_DYNAMO if callable(getattr(space, name, None))]
            if names:
                look = attrgetter(*names)
                self._looks.append((look, space, look(space)))

    def _objects(self) -> Iterator[Any]:
        """What must be the same objects: code, the types' orders, and the members of the model's classes."""
        return chain(map(_code, self._coded), map(_order, self._types), *self._members)

    def why_not(self) -> str:
        """What has changed since; empty where nothing has."""
        try:
            for look, space, was in self._looks:
                if look(space) != was:
                    return PATCHED
        except AttributeError:
            return PATCHED
        if all(map(is_, self._objects(), self._was)):
            return ""
        changed = [*map(_code, self._coded)] != self._was[: len(self._coded)]
        return "a function has other code since" if changed else "a class of the model has changed since"


def why_not_now() -> str:
    """Why a call runs as it was, whichever model is called; empty where it need not."""
    if (
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    ):
        return "there are global module hooks"
    if (
        _tracing_state() is not None
        or fx._symbolic_trace._is_fx_tracing_flag
        or forward_ad._current_level >= 0
    ):
        return "under torch.jit.trace, torch.fx or forward-mode derivatives"
    if _functorch_interpreter() is not None:
        return "under a transform of torch.func"
    # A default device is a mode, too.
    if _dispatch_modes() or (
        _has_function_mode() and any(type(mode) is not DeviceContext for mode in _function_modes())
    ):
        return "a mode that sees every operator is active"
    return ""


# --- Dynamo's guards -------------------------------------------------------------------------------------------------

_MEMBERS = ("_modules", "_parameters", "_buffers")
_ZERO = re.compile(r"\b0\.0\b|\b0j|\b0[+-].*j")


def guard_more(guards: GuardsSet) -> None:
    """Guard more of what a graph is made of: to be called while Dynamo collects its guards."""
    for guard in list(guards):
        source: Any = guard.originating_source
        if isinstance(source, NNModuleSource):
            guards.add(Guard(source, GuardBuilder.ID_MATCH))
        if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            guards.add(Guard(source, _exactly))
        while isinstance(source, NNModuleSource):
            source = source.base
        within: Any = getattr(source, "base", None)
        if isinstance(source, DictGetItemSource) and getattr(within, "member", "") in _MEMBERS:
            guards.add(Guard(within.base, partial(_not_hidden, name=source.index)))


def _exactly(builder: Any, guard: Guard) -> None:
    """A guard that a constant is equal does not see the sign of its zeros, nor what changes inside of it in place.

    Zeros are guarded by how they are written.
    """
    value = builder.get(guard)
    if isinstance(value, (tuple, list)):
        for place in range(len(value)):
            part = Guard(GetItemSource(guard.originating_source, place), GuardBuilder.EQUALS_MATCH)
            builder.EQUALS_MATCH(part)
            _exactly(builder, part)
    elif not isinstance(value, str) and _ZERO.search(text := repr(value)):
        same = (lambda now: repr(now) == text), [f"repr of {guard.name} == {text!r}"]
        manager = builder.get_guard_manager(guard)
        try:
            manager.add_lambda_guard(*same, None)
        except TypeError:  # torch 2.10
            manager.add_lambda_guard(*same)


def _not_hidden(builder: Any, guard: Guard, name: str) -> None:
    """What is in a module's `__dict__` comes before its parameters, buffers and modules."""
    if name not in builder.get(guard).__dict__:
        builder.NOT_PRESENT_IN_GENERIC_DICT(guard, attr=name)
