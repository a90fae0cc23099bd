"""One module's forward as a graph, with its children left as calls.

torch.fx writes down what a forward does with stand-ins for its inputs, and nothing of what it asks of Python on the
way. Here the forward runs with stand-ins for the module and its children too (`shadows`), and only if its code can do
nothing that escapes them (`audit`). What it read becomes the trace's `Guard`; what a guard cannot hold makes the
module untraceable instead of wrong.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError, TracerBase

from epigemm.fusion import allowed, audit, proxies, shadows
from epigemm.fusion.audit import Audit, NoneTest, Untraceable
from epigemm.fusion.guards import Guard, Quiet
from epigemm.fusion.operations import is_known_method
from epigemm.fusion.proxies import OnlyStandIns
from epigemm.fusion.shadows import Path, Place, Recorder, containers, is_shadow, place_of
from epigemm.fusion.state import original_class, why_not_callable
from epigemm.fusion.values import is_constant, is_primitive

_LIBRARY = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen ")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_OWN_MODULES = (__name__, shadows.__name__, audit.__name__)  # with code of dataclasses, which has no file
_MAY_RETURN_NONE = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Signature:
    """A forward's arguments: those without a default become the graph's inputs, the others stay at theirs."""

    inputs: tuple[str, ...]
    optional: dict[str, Any]

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """The graph's inputs of a call; None where they are not all tensors, or an optional argument is given."""
        if kwargs or len(args) != len(self.inputs):
            bound = self._bind_all(args, kwargs)
            if bound is None:
                return None
            args = bound
        for value in args:
            if not isinstance(value, Tensor):
                return None
        return args

    def _bind_all(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        names = (*self.inputs, *self.optional)
        if len(args) > len(names):
            return None
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in names:
                return None
            given[name] = value
        if any(given[name] is not self.optional[name] for name in self.optional if name in given):
            return None
        return [given[name] for name in self.inputs] if all(name in given for name in self.inputs) else None


@dataclass(frozen=True)
class Trace:
    """A forward as a graph, and what it took for granted."""

    graph: fx.Graph
    signature: Signature
    guard: Guard
    inlined: frozenset[int]
    """ids of the children whose own children the graph calls."""
    names: frozenset[str]
    """What it looked up in its class."""


def trace(
    module: nn.Module, training: bool | None = None, quiet: dict[int, Guard | bool] | None = None
) -> Trace:
    """The graph of a module's forward.

    Args:
        module: it is not changed.
        training: as if `train(training)` had been called on it; None: in the mode that it and its children are in.
        quiet: by id, which modules assign nothing, as far as that is known.

    Raises:
        Untraceable: the forward cannot become a graph.
    """
    forward = _forward_of(original_class(type(module)))
    signature = _signature(forward)
    tracer = _Tracer(module, training, {} if quiet is None else quiet)
    recorder = tracer.recorder
    try:
        tracer.run(forward, signature)
    except Untraceable as error:
        raise Untraceable(recorder.refusal or str(error)) from error
    except Exception as error:  # whatever a forward raises when it meets a stand-in
        lines = str(error).strip().splitlines() or [""]
        reason = f"torch.fx cannot trace its forward: {type(error).__name__}: {lines[0]}"
        raise Untraceable(recorder.refusal or reason) from error
    if not recorder.refusal and (changed := recorder.changed()):
        recorder.refuse(f"forward changes {changed}")
    if recorder.refusal:  # of which the forward may have gone on
        raise Untraceable(recorder.refusal)
    recorder.root.reads.statics.append((recorder.root.kind, "forward", forward))
    if recorder.audit.asks_for_types:
        for place in recorder.places.values():
            place.asked_for_type()
    reads = [place.reads for place in recorder.places.values()]
    root = recorder.root.reads
    names = {*root.values, *root.methods, *(name for _, name, _ in root.statics)}
    guard = Guard(reads, recorder.audit.functions, tracer.relied_on())
    return Trace(tracer.graph, signature, guard, frozenset(tracer.inlined), frozenset(names))


def _forward_of(kind: type) -> types.FunctionType:
    forward = inspect.getattr_static(kind, "forward", None)
    if not isinstance(forward, types.FunctionType):
        raise Untraceable(f"its forward is a {type(forward).__name__}")
    if hasattr(forward, "__wrapped__"):
        raise Untraceable("its forward is wrapped by a decorator")
    if allowed.is_of_torch(forward.__code__) and not allowed.may_call(forward.__code__):
        raise Untraceable("its forward is torch's")
    return forward


def _signature(forward: Callable[..., Any]) -> Signature:
    inputs, optional = [], {}
    _, *parameters = inspect.signature(forward).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # traced without any; calls with some do not bind
        if parameter.default is not parameter.empty:
            optional[parameter.name] = parameter.default
        elif parameter.kind == parameter.KEYWORD_ONLY:
            raise Untraceable(f"its argument {parameter.name!r} is keyword-only")
        else:
            inputs.append(parameter.name)
    return Signature(tuple(inputs), optional)


class _Tracer(fx.Tracer):
    """Writes the graph. A call of a child is one node, but for an `nn.Sequential`, whose children are called."""

    def __init__(self, module: nn.Module, training: bool | None, quiet: dict[int, Guard | bool]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.inlined: set[int] = set()
        self.recorder = Recorder(module, training, self.call_place, self._tensor, self._require_quiet)
        self.refuse = self.recorder.refuse
        self._tensors: dict[str, Any] = {}
        self._called: dict[str, nn.Module] = {}
        self._quiet = quiet
        self._relied_on: dict[str, nn.Module] = {}
        self._maybe_none = ""
        self._tests_derived = False

    def run(self, forward: types.FunctionType, signature: Signature) -> None:
        """Write the graph of a forward."""
        functions = self.recorder.audit
        functions.admit(forward)
        functions.enter(forward.__code__)
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in signature.inputs]
        with proxies.recorded_math(self), OnlyStandIns(self.refuse), _watched(self._on_call):
            result = forward(self.recorder.root.shadow, *inputs)
        self._require_plain(result)
        self._require_own(result)
        self._require_kept()
        for audited in functions.functions:
            for name, value in audited.names:
                if is_constant(value) and not isinstance(value, torch.dtype):
                    self._require_quiet(f"the global {name}")
        self.create_node("output", "output", (self.create_arg(result),), {})
        if self._tests_derived and self._maybe_none:
            raise Untraceable(f"forward compares with None, and {self._maybe_none} may be None")

    # --- nodes ---

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The stand-in of a node."""
        return proxies.Stand(node, self)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> fx.Node:
        """A node."""
        node = TracerBase.create_node(self, kind, target, args, kwargs, *rest, **named)
        if kind == "call_method" and is_known_method(target):
            self._note_method(target)
        proxies.mark(node, kind == "call_module" and self._is_loud(self._called[target]))
        if proxies.may_be_none(node):
            self.note_maybe_none(node.name)
        return node

    def _note_method(self, name: str) -> None:
        """A method that a chain may replace must stay torch's own."""
        static = (Tensor, name, getattr(Tensor, name))
        statics = self.recorder.root.reads.statics
        if static not in statics:
            statics.append(static)

    def note_maybe_none(self, name: str) -> None:
        """A value of this name may be None."""
        self._maybe_none = self._maybe_none or name

    def create_arg(self, a: Any) -> Any:
        """An argument of a node."""
        if not proxies.is_stand(a) and not is_shadow(a) and isinstance(a, Tensor):
            raise self.refuse("forward uses a tensor that depends on none of its inputs")
        if is_shadow(a):
            raise self.refuse(f"forward hands {place_of(a).reads.name()} to a function")
        return TracerBase.create_arg(self, a)

    def _tensor(self, path: Path) -> Any:
        target = ".".join(path)
        if target not in self._tensors:
            self._tensors[target] = self.create_proxy("get_attr", target, (), {})
        return self._tensors[target]

    def call_place(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module."""
        module, target = place.module, ".".join(place.path)
        if not target:
            raise self.refuse("forward calls its own module")
        if place.kind is nn.Sequential and not why_not_callable(module):
            place.reads.inlined = True
            place.asked_for_type()
            self.inlined.add(id(module))
            forward: Any = nn.Sequential.forward
            return forward(place.shadow, *args, **kwargs)
        if self._is_loud(module) and any(_holds_mutable(value) for value in (*args, *kwargs.values())):
            raise self.refuse(f"forward gives {target} a list or a dict, which it might change")
        self._called[target] = module
        if place.kind.__module__.startswith("torch.nn.") and place.kind is not nn.Sequential:
            # A fused call reads its attributes; these classes stay as they are when models are fused.
            self.recorder.places[place.path[:-1]].reads.leaves[place.path[-1]] = place.kind
        return self.create_proxy("call_module", target, args, kwargs)

    def _is_loud(self, module: nn.Module) -> bool:
        """Whether people wrote the module, so that its call may do anything."""
        kind = original_class(type(module))
        of_torch = kind.__module__.split(".")[0] == "torch" and not isinstance(module, fx.GraphModule)
        return not of_torch or isinstance(module, _MAY_RETURN_NONE) or _holds_loud(module, self)

    def _require_quiet(self, name: str) -> None:
        """TraceError if a child was called before, whose forward might assign what is read now."""
        for target, module in self._called.items():
            for part in module.modules():
                if id(part) not in self._quiet:
                    self._quiet[id(part)] = self._is_quiet(part)
                if not self._quiet[id(part)]:
                    raise self.refuse(f"forward reads {name} after calling {target}, which might change it")
            self._relied_on[target] = module

    def _require_kept(self) -> None:
        """TraceError if a child that was called might replace its tensors or children that were read.

        The graph may read them at another time than the forward does.
        """
        read = {
            id(place.module): place.reads
            for place in self.recorder.places.values()
            if place.reads.tensors or place.reads.names is not None or place.reads.inlined
        }
        for module in self._called.values():
            for part in module.modules():
                if id(part) in read:
                    self._require_quiet(f"{read[id(part)].name()}'s tensors")
                    return

    def relied_on(self) -> list[Quiet]:
        """The children that must go on assigning nothing, and all that is in them."""
        found = {}
        for target, module in self._relied_on.items():
            for name, part in module.named_modules():
                path = (*target.split("."), *(name.split(".") if name else ()))
                guard = self._quiet[id(part)]
                found[path] = Quiet(
                    path,
                    original_class(type(part)),
                    [*part._modules],
                    guard if isinstance(guard, Guard) else None,
                )
        return list(found.values())

    def _is_quiet(self, module: nn.Module) -> Guard | bool:
        """Whether a module's forward surely assigns nothing: one that can be traced does not, while its guard holds."""
        if why_not_callable(module):
            return False
        kind = original_class(type(module))
        if kind.__module__.split(".")[0] == "torch" and not isinstance(module, fx.GraphModule):
            return True
        try:
            # Not watched by this trace's profile function, for it is no part of this forward.
            with _watched(lambda frame: None):
                return trace(module, self.recorder.training, self._quiet).guard
        except Untraceable:
            return False

    def _require_plain(self, result: Any) -> None:
        """TraceError unless the result is made of what a graph gives back as it was."""
        kind = type(result)
        if kind in (list, tuple):
            for part in result:
                self._require_plain(part)
        elif kind is dict:
            for key, part in result.items():
                if not is_constant(key):
                    raise self.refuse("forward returns a dict with other keys than numbers and strings")
                self._require_plain(part)
        elif not (proxies.is_stand(result) or is_primitive(result)):
            raise self.refuse(f"forward returns a {'module' if is_shadow(result) else kind.__name__}")

    def _require_own(self, result: Any) -> None:
        """TraceError if the result holds a list of the module's, or one list twice: the graph makes new ones."""
        found = list(containers(result))
        given = {part for value in self.recorder.given.values() for part in containers(value)}
        if len(set(found)) < len(found) or given.intersection(found):
            raise self.refuse("forward returns a list or a dict that is also somewhere else")

    # --- Python's calls ---

    def _on_call(self, frame: types.FrameType) -> None:
        """A Python function is about to run: it must be one that may."""
        code, caller = frame.f_code, frame.f_back
        functions: Audit = self.recorder.audit
        if caller is None or allowed.is_own(code) or frame.f_globals.get("__name__", "") in _OWN_MODULES:
            return
        from_forward = functions.is_done(caller.f_code)
        if allowed.is_of_torch(code):
            calls = from_forward and not _is_about_the_dead(frame)
            if calls and not allowed.may_call(code) and not functions.enter(code):
                self._refuse_call(code)
            return
        if not from_forward and not functions.expects(code) and _is_library(code, caller.f_code):
            return
        try:
            if not functions.enter(code):
                self._refuse_call(code)
        except Untraceable as error:
            self.refuse(str(error))
            raise
        self._on_forward_code(frame)

    def _refuse_call(self, code: types.CodeType) -> None:
        self.refuse(f"forward calls {code.co_name} of {code.co_filename.rsplit('/', 1)[-1]}")
        raise Untraceable(self.recorder.refusal)

    def _on_forward_code(self, frame: types.FrameType) -> None:
        code = frame.f_code
        values = frame.f_locals
        first = values.get(code.co_varnames[0]) if code.co_varnames else None
        self.recorder.note_inherited(code, first)
        for test in self.recorder.audit.tests(code):
            self._check_test(test, values)

    def _check_test(self, test: NoneTest, values: dict[str, Any]) -> None:
        """`value is None` gives False for every stand-in: what is None must be one of what it stands for."""
        if not test.name or test.name not in values:
            self._note_derived(test)
            return
        value = values[test.name]
        for attribute in test.attributes:
            if not is_shadow(value):
                self._note_derived(test)
                return
            what = place_of(value).kind_of_attribute(attribute)
            if what == "other":
                self._note_derived(test)
                return
            if what == "plain":
                return
            value = place_of(value)._child(attribute)
        derived = proxies.is_stand(value) and not proxies.is_given(value)
        if derived and (test.constant is not None or proxies.may_be_none(value.node)):
            raise self.refuse(f"forward compares {test.name} with {test.constant}")

    def _note_derived(self, test: NoneTest) -> None:
        if test.constant is not None:
            raise self.refuse(f"forward compares something computed with {test.constant} by `is`")
        self._tests_derived = True


def _holds_loud(module: nn.Module, tracer: _Tracer) -> bool:
    return any(tracer._is_loud(child) for child in module.children())


def _holds_mutable(value: Any) -> bool:
    if type(value) is tuple:
        return any(_holds_mutable(part) for part in value)
    return type(value) in (list, dict)


def _is_about_the_dead(frame: types.FrameType) -> bool:
    """Whether it is a callback of a weak reference: these run whenever something has gone, called by nobody."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return len(names) > 0 and any(issubclass(type(frame.f_locals.get(name)), weakref.ref) for name in names)


def _is_library(code: types.CodeType, caller: types.CodeType) -> bool:
    """Whether it is Python's library, or something else that torch or the library calls on their own."""
    return _is_in_library(code) or _is_in_library(caller)


def _is_in_library(code: types.CodeType) -> bool:
    # Packages may be installed in a folder of the library.
    name = code.co_filename
    return name.startswith(_LIBRARY) and not any(folder in name for folder in _PACKAGES)


@contextmanager
def _watched(on_call: Callable[[types.FrameType], None]) -> Iterator[None]:
    """Tells of every Python function that this thread calls."""

    def profile(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            on_call(frame)

    previous = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()  # its finalizers would run in the midst of a forward
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(previous if callable(previous) else None)
        if collects:
            gc.enable()
        if previous is not None and not callable(previous):
            previous.enable()  # cProfile's own


__all__ = ["Signature", "Trace", "TraceError", "Untraceable", "trace"]
