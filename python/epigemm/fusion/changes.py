"""Whether a call may run the graphs of a model, and guards in addition to those of Dynamo.

Dynamo does not notice if functions of torch or of the model's classes are replaced. A call checks those whose names
occur in the traced code. Dynamo also does not guard whether two modules become one object, whether an attribute hides a
member, and the sign of a zero. `guard_more` adds these guards.
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
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource, NNModuleSource
from torch._guards import Guard, GuardsSet, Source, TracingContext
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from epigemm import _native
from epigemm.epilogues.tracing.program import words
from epigemm.fusion import inlined
from epigemm.fusion.inlined import Inlined

OTHER_CODE = "a function has other code since"
_code, _order = attrgetter("__code__"), attrgetter("__mro__")
# Their state when epigemm is imported.
_SPACES: dict[Any, dict[str, Any]] = {space: dict(vars(space)) for space in (torch, F, Tensor, nn.Module)}
_CODED = (nn.Linear.forward, F.relu, F.batch_norm, nn.Module._call_impl)
_CODES = [each.__code__ for each in _CODED]
_END = (object(),)  # marks the end of a class's members
_GONE = object()
# Functions that Dynamo itself wraps at its first compilation.
_OF_DYNAMO = {"__init__", "__setstate__", "manual_seed", "seed"}
# Functions that are called without their name in the code.
_UNNAMED = words(
    "__call__ forward _call_impl _wrapped_call_impl __getattr__ __torch_function__ __add__ __iadd__ __radd__ __sub__ "
    "__isub__ __rsub__ __mul__ __imul__ __rmul__ __truediv__ __itruediv__ __rtruediv__ __matmul__ __rmatmul__ __neg__ "
    "__pow__ __getitem__"
)
# Looked up once, because the call's time on the host is microseconds.
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
# From CPython 3.12 on, changes are counted: the count, and a function that makes it include more objects.
_changes: Callable[[], int] = getattr(_native.entry, "changes", int)
_watch: Callable[..., bool] = getattr(_native.entry, "watch", lambda *_: False)


def _is_replaced(space: Any, name: str) -> bool:
    """Whether a function of torch, or a C function that a class inherits, has been replaced."""
    now, was = vars(space).get(name, _GONE), _SPACES[space].get(name, _GONE)
    if was is _GONE:
        was = getattr(space.__base__, name, _GONE) if isinstance(space, type) and now is not _GONE else now
    return now is not was and callable(was) and name not in _OF_DYNAMO


def _replaced(space: Any, name: str) -> str:
    return f"{space.__name__}.{name} was replaced"


def _value(space: Any, path: str) -> Any:
    try:
        return attrgetter(path)(space)
    except AttributeError:
        return _GONE


class Watched:
    """The functions of torch and the classes from which a model's graphs were made.

    A call of the model compares all of them with their earlier state, in loops that run in C. If CPython counts
    changes, only the first call after a change compares.
    """

    def __init__(self, model: nn.Module) -> None:
        self._types = [
            *{type(module) for module in model.modules()}
        ]  # their method resolution orders change with those of their bases
        kinds = {kind for each in self._types for kind in each.__mro__} - {object}
        of_torch = [kind for kind in kinds if kind.__module__.startswith("torch.nn.")]
        self._spaces = dict.fromkeys([*_SPACES, *of_torch], True)
        self._own = kinds - self._spaces.keys()
        own = [vars(kind).values() for kind in self._own]
        self._members = [each for values in own for each in (values, _END)]
        self._coded = [value for values in own for value in values if isinstance(value, FunctionType)]
        self._was = [*self._objects()]
        self._names, self._read = set(_UNNAMED), set[str]()
        self._edition = 0  # of the list of what is compared
        self.inlined = Inlined()
        self._is_told = _watch()  # whether CPython counts all changes
        self._known = (-1, 0, "")  # the count, the edition and the answer of the last comparison
        self._look()

    def note(self, context: TracingContext, graph: fx.Graph) -> str:
        """Compare also what a graph was made from; returns why it must not run if a function of torch was replaced.

        A graph calls functions of torch by their names, so it may call a function from inside of its own replacement.
        """
        codes = [*(context.traced_code or ()), *_codes_within(graph)]
        self._names.update(name for code in codes for name in code.co_names)
        self._read |= {*_members_read(context.guards_context.dynamo_guards), *_called(graph)}
        self._look()
        if [each.__code__ for each in _CODED] != _CODES:
            return OTHER_CODE
        named = ((space, name) for space in _SPACES for name in self._named(space))
        return next((_replaced(*each) for each in named if _is_replaced(*each)), "")

    def note_class(self, kind: type) -> None:
        """Compare also the functions of a class, of which the traced code used an object."""
        if kind not in self._spaces and kind not in self._own:
            self._spaces[kind] = False
            self._look_at(kind)
            self._edition += 1

    def _look(self) -> None:
        """Take the present state of everything that is compared as the one to compare with."""
        self._looks: list[tuple[Callable[[Any], Any], Any, list[str], Any]] = []
        for space in self._spaces:
            self._look_at(space)
        self._edition += 1

    def _named(self, space: Any) -> set[str]:
        """The names to compare. For a module only those read from objects: tensors have methods of these names."""
        return (self._names if isinstance(space, type) else self._read) - _OF_DYNAMO

    def _look_at(self, space: Any) -> None:
        spaces = reversed(space.__mro__) if isinstance(space, type) else [space]
        members = {name: value for each in spaces for name, value in vars(each).items()}
        functions = {
            name
            for name in self._named(space) & members.keys()
            if isinstance(getattr(members[name], "__func__", members[name]), FunctionType)
        }
        names = [*functions, *(f"{name}.__code__" for name in functions)]
        if self._spaces[space]:
            others = self._named(space) - functions
            names += [name for name in others if callable(getattr(space, name, None))]
        if names:
            look = attrgetter(*names)
            self._looks.append((look, space, names, look(space)))

    def _objects(self) -> Iterator[Any]:
        """Objects whose identity is compared: code, the types' orders, and the members of the model's classes."""
        return chain(map(_code, self._coded), map(_order, self._types), *self._members)

    def why_not(self) -> str:
        """What has changed since; empty if nothing has."""
        changes, edition, reason = self._known
        if changes != _changes() or edition != self._edition:
            reason = self._compared_again()
        if not reason and self.inlined.compares and self.inlined.have_changed():
            return inlined.CHANGED
        return reason

    def _compared_again(self) -> str:
        # In this order, so that a change by another thread in the meantime is compared again.
        changes, edition = _changes(), self._edition
        self._is_told = self._is_told and _watch(*self._watched())
        reason = self._compared()
        self._known = (changes if self._is_told else -1, edition, reason)
        return reason

    def _watched(self) -> Iterator[Any]:
        """The modules' dictionaries and the classes that are compared."""
        looked_at = *self._spaces, *self._own
        kinds = [each for each in looked_at if isinstance(each, type)]
        yield from (vars(each) for each in looked_at if not isinstance(each, type))
        yield from {base for kind in kinds for base in kind.__mro__}

    def _compared(self) -> str:
        for look, space, names, was in self._looks:
            try:
                if look(space) == was:
                    continue
            except AttributeError:
                pass
            before = dict(zip(names, was if len(names) > 1 else [was], strict=True))
            return _replaced(space, next(name for name in names if _value(space, name) != before[name]))
        if all(map(is_, self._objects(), self._was)):
            return ""
        changed = [*map(_code, self._coded)] != self._was[: len(self._coded)]
        return OTHER_CODE if changed else "a class of the model has changed since"


def _members_read(guards: Iterable[Guard]) -> Iterator[str]:
    """The names of attributes that traced code read from modules and other objects."""
    for guard in guards:
        source: Any = guard.originating_source
        while source is not None:
            if isinstance(source, AttrSource):
                yield source.member
            source = getattr(source, "base", None)


def _called(graph: fx.Graph) -> Iterator[str]:
    """The names of the functions that a graph calls, and of those that these have in their code."""
    for node in graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "__name__", "")
            yield from (name, name.rstrip("_"))  # a chain calls the out-of-place form
    for code in _codes_within(graph):
        yield from code.co_names


def _codes_within(graph: fx.Graph) -> Iterator[CodeType]:
    """The code of Python functions that a graph calls, as `F.relu`, and of functions that these call."""
    called = [
        getattr(Tensor, node.target, None) if node.op == "call_method" else node.target
        for node in graph.nodes
        if node.op in ("call_function", "call_method")
    ]
    seen: set[Any] = set()
    while called:
        function = called.pop()
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            yield function.__code__
            named = map(function.__globals__.get, function.__code__.co_names)
            called += [each for each in named if getattr(each, "__globals__", 0) is function.__globals__]


def why_not_now() -> str:
    """Why a call of any model runs the original forward now; empty if it need not."""
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
    if _dispatch_modes() or (_has_function_mode() and sees_functions()):
        return "a mode that sees every operator is active"
    return ""


def sees_functions() -> bool:
    """Whether a function mode other than that of a default device is active."""
    return any(type(mode) is not DeviceContext for mode in _function_modes())


def why_not_with(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call with these arguments runs the original forward."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if type(value) is not Tensor and type(value) is not nn.Parameter:
                return f"an argument is a {type(value).__name__}"
            if value.is_nested:
                return "an argument is a nested tensor"
    return ""


# --- Dynamo's guards -------------------------------------------------------------------------------------------------

_MEMBERS = ("_modules", "_parameters", "_buffers")
_ZERO = re.compile(r"\b0\.0\b|\b0j|\b0[+-].*j")


def guard_more(guards: GuardsSet, watched: Watched) -> None:
    """Add guards on what a graph was made from. To be called while Dynamo collects its guards."""
    modules: dict[str, Source] = {}
    for guard in list(guards):
        source: Any = guard.originating_source
        if guard.create_fn_name() == "TYPE_MATCH":
            guards.add(Guard(source, partial(_class_of, watched=watched)))
        if isinstance(source, NNModuleSource):
            modules[guard.name] = source
        if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            guards.add(Guard(source, _exactly))
        while isinstance(source, NNModuleSource):
            source = source.base
        within: Any = getattr(source, "base", None)
        if isinstance(source, DictGetItemSource) and getattr(within, "member", "") in _MEMBERS:
            guards.add(Guard(within.base, partial(_not_hidden, name=source.index)))
    for source in [*modules.values()][:1]:
        guards.add(Guard(source, partial(_apart, modules=modules.values())))


def _exactly(builder: Any, guard: Guard) -> None:
    """Guard constants exactly: Dynamo's equality does not notice signs of zeros, or changes inside a tuple in place.

    Zeros are guarded by their text.
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


def _class_of(builder: Any, guard: Guard, watched: Watched) -> None:
    """Have the class of an object watched: Dynamo guards which class it is, but nothing in the class."""
    watched.note_class(type(builder.get(guard)))


def _apart(builder: Any, guard: Guard, modules: Iterable[Source]) -> None:
    """Guard that different modules stay different objects, which Dynamo guards for tensors alone."""
    for source in {id(builder.get(source)): source for source in modules}.values():
        builder.no_tensor_aliasing_names.append(source.name)
        builder.no_tensor_aliasing_guard_managers.append(builder.get_guard_manager_from_source(source))


def _not_hidden(builder: Any, guard: Guard, name: str) -> None:
    """Guard that no attribute in a module's `__dict__` hides a parameter, buffer or module of this name."""
    if name not in builder.get(guard).__dict__:
        builder.NOT_PRESENT_IN_GENERIC_DICT(guard, attr=name)
