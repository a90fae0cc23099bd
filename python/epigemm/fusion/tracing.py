"""One module's forward as a graph, by torch.fx, with its children left as calls.

fx writes down what a forward does with stand-ins for its inputs, and nothing of what it asks of Python on the way. Here
the forward runs on a *shadow* of the module, which shares its parameters and records every attribute that is read:
those are the trace's `Guard`. What a guard cannot hold (assignments, changed modes, tensors made on the way, tests of
an input's type) makes the module untraceable instead of wrong.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from epigemm.fusion import guards
from epigemm.fusion.guards import Guard, Unwatchable

_FX = str(Path(fx.__file__).parent)
_TRANSPARENT = (
    _FX,
    str(Path(nn.__file__).parent / "parameter.py"),
    str(Path(torch.overrides.__file__)),
    __file__,
)
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_ASKS_FOR_MODES = {"is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled", "is_compiling"}


class Untraceable(Exception):
    """A forward that cannot become a graph, and why."""


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


def trace(module: nn.Module, training: bool | None = None) -> Trace:
    """The graph of a module's forward.

    Args:
        module: it is not changed.
        training: as if `train(training)` had been called on it; None: in the mode that it and its children are in.

    Raises:
        Untraceable: the forward cannot become a graph.
    """
    forward = type(module).forward
    signature = _signature(forward)
    _refuse_questions(forward)
    recorder = _Recorder(training)
    try:
        shadow = recorder.shadow(module, ())
        tracer = _Tracer(signature.inputs, recorder)
        graph = tracer.trace(shadow)
    except Unwatchable as error:
        raise Untraceable(f"forward reads {error}, whose changes could not be noticed") from error
    except Exception as error:  # whatever a forward raises when it meets a stand-in
        lines = str(error).strip().splitlines() or [""]
        raise Untraceable(f"torch.fx cannot trace its forward: {type(error).__name__}: {lines[0]}") from error
    finally:
        changed = recorder.restore()
    if changed:
        raise Untraceable(f"forward changes {changed}")
    guard = recorder.guard
    guard.names += guards.globals_of(inspect.unwrap(forward))
    guard.layout = guards.layout(module)
    return Trace(graph, signature, guard, frozenset(tracer.inlined))


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


def _refuse_questions(forward: Callable[..., Any]) -> None:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    asked = _ASKS_FOR_MODES.intersection(code.co_names if code is not None else ())
    if asked:
        raise Untraceable(f"forward asks {sorted(asked)[0]}()")


class _Recorder:
    """Makes shadows and keeps what is read from them."""

    def __init__(self, training: bool | None) -> None:
        self.guard = Guard()
        self._training = training
        self._shadows: dict[int, nn.Module] = {}
        self._originals: dict[int, nn.Module] = {}
        self._containers: list[tuple[str, Any, Any]] = []

    def shadow(self, module: nn.Module, path: tuple[str, ...]) -> nn.Module:
        """A module that shares the tensors of `module` and whose attributes are recorded."""
        known = self._shadows.get(id(module))
        if known is not None:
            return known
        kind = _shadow_class(guards.original_class(module))
        made: nn.Module = object.__new__(kind)
        self._shadows[id(module)], self._originals[id(made)] = made, module
        own = made.__dict__
        own.update(module.__dict__)
        own["_parameters"], own["_buffers"] = dict(module._parameters), dict(module._buffers)
        own["_modules"] = {
            name: None if child is None else self.shadow(child, (*path, name))
            for name, child in module._modules.items()
        }
        if self._training is not None:
            own["training"] = self._training
        own["_epigemm_recorder"] = self
        own["_epigemm_path"] = path
        return made

    def original(self, shadow: nn.Module) -> nn.Module:
        """The module that a shadow was made of."""
        return self._originals[id(shadow)]

    def read(self, path: tuple[str, ...], name: str, value: Any) -> None:
        """The forward has read an attribute."""
        if isinstance(value, (list, dict, set)):
            self._containers.append((".".join(("self", *path, name)), value, value.copy()))
        try:
            self.guard.record(path, name, value)
        except Unwatchable as error:
            raise Unwatchable(f"{'.'.join(('self', *path, name))}, {error}") from None

    def restore(self) -> str:
        """Undo what the trace did to lists and the like; the name of one that it changed."""
        changed = ""
        for name, container, before in reversed(self._containers):
            if len(container) == len(before) and all(
                a is b for a, b in zip(_parts(container), _parts(before), strict=True)
            ):
                continue
            changed = name
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        return changed


def _parts(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return sorted(container, key=id) if isinstance(container, set) else container


def _shadow_class(base: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        if name in _INTERNALS or name.startswith(("__", "_epigemm")):
            return value
        own = object.__getattribute__(self, "__dict__")
        if name in own or guards.is_primitive(value):
            own["_epigemm_recorder"].read(own["_epigemm_path"], name, value)
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:
        raise TraceError(f"forward assigns self.{name}")

    body = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    return type(base)(f"Shadow{base.__name__}", (base,), body)


class _Proxy(fx.Proxy):
    """A stand-in that does not let itself be taken for something that is no tensor."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # isinstance() comes here. In fx it must see a Proxy; in a forward the answer would be baked into the graph.
        if sys._getframe(1).f_code.co_filename.startswith(_TRANSPARENT):
            return _Proxy
        raise TraceError("forward asks for the type of a tensor")


class _Tracer(fx.Tracer):
    """Every call of a child is one node, but for an `nn.Sequential`, whose children are called one by one."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: tuple[str, ...], recorder: _Recorder) -> None:
        super().__init__()
        self.inlined: set[int] = set()
        self._recorder = recorder
        self._inputs = inputs
        self._modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module is one node."""
        module = self._recorder.original(m)
        if not guards.is_transparent(module):
            return True
        self.inlined.add(id(module))
        return False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The stand-in of a node."""
        return _Proxy(node, self)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Stand-ins for the arguments that have no default."""
        stand_ins = [self.create_proxy("placeholder", name, (), {}) for name in self._inputs]

        def run(*args: Any) -> Any:
            result = root_fn(*args)
            _require_plain(result)
            return result

        return run, [self.root, *stand_ins]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node; in another mode than the forward's it would be lost that it is."""
        if _modes() != self._modes:
            raise TraceError("forward switches gradients, inference mode or autocast")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """An argument of a node; a tensor must have a name."""
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs:
            named = any(a is buffer for buffer in self.root.buffers())
            if not named:
                raise TraceError("forward makes a tensor that depends on none of its inputs")
        return super().create_arg(a)


def _modes() -> tuple[Any, ...]:
    autocast = [
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _require_plain(result: Any) -> None:
    """TraceError unless the result is made of what a graph gives back as it was."""
    kind = type(result)
    if isinstance(result, (list, tuple)) and (kind in (list, tuple) or hasattr(kind, "_fields")):
        for part in result:
            _require_plain(part)
    elif kind is dict:
        for part in result.values():
            _require_plain(part)
    elif not (issubclass(kind, fx.Proxy) or isinstance(result, Tensor) or guards.is_primitive(result)):
        raise TraceError(f"forward returns a {kind.__name__}")
