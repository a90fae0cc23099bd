"""`fuse` and `unfuse`: a model's modules get fused forwards, and keep everything else that they have.

Each module whose forward holds a chain changes its class to a subclass of it that differs in `forward` alone: names,
parameters, buffers, hooks, `isinstance` and state dicts stay as they are. That forward runs the rewritten
graph where its guard holds, and otherwise the one of the original class.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from epigemm import checks
from epigemm.fusion import building, codegen, copies
from epigemm.fusion.audit import functions_of_class
from epigemm.fusion.guards import Guard
from epigemm.fusion.report import FusedSite, FusionReport, Skipped
from epigemm.fusion.rest import Fused, Rest, sleep
from epigemm.fusion.rewrite import fuse_graph
from epigemm.fusion.site import tell_watchers, watchers
from epigemm.fusion.state import original_class
from epigemm.fusion.tracing import Signature, Trace, Untraceable, trace

_is_compiling = torch.compiler.is_compiling
_Model = TypeVar("_Model", bound=nn.Module)


@overload
def fuse(
    model: _Model, inplace: bool = False, dry_run: Literal[False] = False, *, keep_packs: bool = False
) -> _Model: ...
@overload
def fuse(
    model: nn.Module, inplace: bool = False, *, dry_run: Literal[True], keep_packs: bool = False
) -> FusionReport: ...
def fuse(model: Any, inplace: bool = False, dry_run: bool = False, *, keep_packs: bool = False) -> Any:
    """A model whose linear layers are fused with what follows them, wherever epigemm has an epilogue for it.

    Matches `model(...)`: the same values within rounding, types, gradients and side effects. What is found in each
    module's forward is told by `fusion_report`. Calls for which a fused kernel would give another result (hooks,
    BatchNorm in training mode, mixed dtypes, changed attributes, ...) run as they did before; `epigemm.fusion.watch`
    shows which. Parameters and buffers are the same objects under the same names.

    Args:
        model: any module. Its forwards run once or twice on stand-ins for tensors.
        inplace: change `model` itself instead of a copy that shares its parameters and buffers.
        dry_run: change nothing, and return the report alone.
        keep_packs: let fp32 weights keep the fp16 pieces that their products are computed from, as those of
            `epigemm.nn` layers do: faster, and safe but for writes that torch does not count (those through `.data`).
            After such writes call `epigemm.pack(weight).repack()`.

    Returns:
        The fused model, its report in the attribute `fusion_report`; with `dry_run` the report. A model that
        cannot be copied is returned as it is, with the reason in the report.

    Raises:
        TypeError: `model` is no module, or a flag is neither True nor False.

    Example:
        >>> model = epigemm.fuse(nn.Sequential(nn.Linear(64, 32), nn.ReLU()))
        >>> model(torch.randn(8, 64)).shape
        torch.Size([8, 32])
        >>> print(model.fusion_report)
        fused 1 site
          0: epigemm.linear_relu for 0 (nn.Linear) -> 1 (nn.ReLU)
    """
    _require_module(model)
    checks.flag("inplace", inplace)
    checks.flag("dry_run", dry_run)
    checks.flag("keep_packs", keep_packs)
    if dry_run:
        return _fuse_all(model, act=False)
    if not inplace:
        copied = copies.copied(model)
        if isinstance(copied, str):
            report = FusionReport(
                skipped=[Skipped(type(model).__name__, f"{copied}; accepted is inplace=True")]
            )
            model.__dict__["fusion_report"] = report
            return model
        model = copied
    unfuse(model)
    model.__dict__["fusion_report"] = _fuse_all(model, act=True, keep_packs=keep_packs)
    _oversee(model, keep_packs=keep_packs)
    return model


def unfuse(model: _Model) -> _Model:
    """Undo `fuse`, in place: every module gets its own forward back.

    Args:
        model: a fused model, or any other, which stays as it is.

    Returns:
        `model`, without `fusion_report`.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> fused = epigemm.fuse(nn.Sequential(nn.Linear(64, 32), nn.ReLU()))
        >>> type(epigemm.unfuse(fused))
        <class 'torch.nn.modules.container.Sequential'>
    """
    _require_module(model)
    for module in model.modules():
        original = original_class(type(module))
        if original is not type(module):
            module.__class__ = original
        for name in (_STATE, "fusion_report"):
            module.__dict__.pop(name, None)
    return model


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; accepted is a torch.nn.Module")


# --- the modules of a model -------------------------------------------------------------------------------------------


def _fuse_all(model: nn.Module, *, act: bool, keep_packs: bool = False) -> FusionReport:
    report = FusionReport()
    inlined: set[int] = set()
    for name, module, reason in _candidates(model):
        if reason:
            report.skipped.append(Skipped(name or type(module).__name__, reason))
            continue
        found = _fuse_one(name, module, inlined, act=act, keep_packs=keep_packs)
        # Fused all the same: where the outer forward cannot run fused, this one may.
        if id(module) not in inlined:
            report.add(found)
    return report


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every module with a forward of its own to look into, and a reason not to, if there is one."""
    inside_wrapper: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside_wrapper:
            continue
        kind = type(module)
        wrapper = copies.WRAPPERS.intersection(ancestor.__name__ for ancestor in kind.__mro__)
        if wrapper:
            inside_wrapper.update(id(child) for child in module.modules())
            yield name, module, f"inside {min(wrapper)}; accepted is to fuse the model before it is wrapped"
        elif reason := _why_not_its_class(module):
            yield name, module, reason
        elif isinstance(module, torch.jit.ScriptModule):
            yield name, module, "a TorchScript module"
        elif "forward" in module.__dict__:
            yield name, module, "it has a forward of its own, set on the instance"
        elif _is_of_torch(module):
            if isinstance(module, nn.Linear) and not name:
                yield name, module, "a linear layer alone; call epigemm.linear"
            elif _has_linear(module) and not isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.DataParallel)
            ):
                yield name, module, f"torch's own {kind.__name__} is not looked into"
        elif kind.forward is not nn.Module.forward:
            yield name, module, ""


def _why_not_its_class(module: nn.Module) -> str:
    """Why the module's class cannot be changed, or a trace of its forward not be looked for."""
    kind = type(module)
    if any("_epigemm_original" in vars(ancestor) for ancestor in kind.__mro__[1:]):
        return "its class derives from a fused one; accepted is to change classes before fusing"
    for function in functions_of_class(kind):
        names = function.__code__.co_names
        if "super" in names and ("type" in names or "__class__" in names):
            return f"{function.__qualname__} calls super() with the class of self, which fusing changes"
    return ""


_PLAIN_NAMES = {
    *("__init__", "__module__", "__doc__", "__annotations__", "__annotate__", "__annotations_cache__"),
    *(
        "__firstlineno__",
        "__static_attributes__",
        "__orig_bases__",
        "__parameters__",
        "__dict__",
        "__weakref__",
    ),
}


def _only_calls_its_children(kind: Any) -> bool:
    """Whether a class is nn.Sequential, or one derived from it that only knows how to make itself.

    Then nothing that people wrote sees that an object's class is another one.
    """
    if type(kind) is not type or not issubclass(kind, nn.Sequential):
        return False
    own = kind.__mro__[: kind.__mro__.index(nn.Sequential)]
    return all(vars(ancestor).keys() <= _PLAIN_NAMES for ancestor in own)


def _is_of_torch(module: nn.Module) -> bool:
    """Modules that torch defines, but for those that only call their children."""
    if type(module) is nn.Sequential or isinstance(module, fx.GraphModule):
        return False
    return type(module).__module__.split(".")[0] == "torch"


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) and child is not module for child in module.modules())


# --- one module -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A fused forward, for eager mode and as compilers see it, and when it may run."""

    signature: Signature
    guard: Guard
    run: Callable[..., Any]
    run_compiled: Callable[..., Any]


def _fuse_one(
    name: str, module: nn.Module, inlined: set[int], *, act: bool, keep_packs: bool
) -> FusionReport:
    """Fuse one module's forward; what the report says of the children in `inlined` is in it."""
    report = FusionReport()
    plans: dict[bool | None, Plan] = {}
    modes: list[bool | None] = [None]
    names: set[str] = set()
    for training in modes:
        try:
            traced = trace(module, training)
        except Untraceable as error:
            report.skipped += _untraceable(name, module, str(error))
            continue
        if training is None and traced.guard.reads_training():
            modes += [False, True]  # a forward for each: the mode changes at will
        plan = _plan(name, module, traced, report, keep_packs, act=act)
        inlined |= traced.inlined
        names |= traced.names
        if plan is not None:
            plans[training] = plan
    if len({child.training for child in module.modules()}) == 1 and module.training in plans:
        plans.pop(None, None)  # it is one of the others
    if plans and act:
        try:
            made = _fused_class(type(module))
            module.__class__ = made
            module.__dict__[_STATE] = _State(name, list(plans.values()), made, frozenset(names), keep_packs)
        except Exception as error:  # whatever a class does with its subclasses
            return FusionReport(
                skipped=[Skipped(name or type(module).__name__, f"its class cannot change: {error}")]
            )
    return report


def _oversee(model: nn.Module, *, keep_packs: bool) -> None:
    """Have a model that is not fused itself rest as a whole, instead of each of the fused modules inside of it."""
    inside = sum(_STATE in module.__dict__ for module in model.modules())
    itself = next((reason for name, _, reason in _candidates(model) if not name), "nothing to look into")
    if _STATE in model.__dict__ or inside < 2 or itself or not _only_calls_its_children(type(model)):
        return  # then each of them does
    made = _fused_class(type(model))
    model.__class__ = made
    model.__dict__[_STATE] = _State("", [], made, frozenset(), keep_packs)


def _plan(
    name: str, module: nn.Module, traced: Trace, report: FusionReport, keep_packs: bool, *, act: bool
) -> Plan | None:
    try:
        found = fuse_graph(traced.graph, ModuleValues(module), name, keep_packs=keep_packs)
        title = f"{type(module).__name__}.forward"
        run = codegen.function(traced.graph, title) if found.sites else None
        shown = act and found.sites
        run_compiled = building.forward_for_compilers(traced.graph, module, title) if shown else None
    except (ValueError, ArithmeticError, SyntaxError) as error:  # numbers that no float holds, or no text
        report.skipped += _untraceable(name, module, f"its graph cannot be rewritten: {error}")
        return None
    report.add(found)
    return None if run is None else Plan(traced.signature, traced.guard, run, run_compiled or run)


def _untraceable(name: str, module: nn.Module, reason: str) -> list[Skipped]:
    """Worth a line only where something could have been fused."""
    own = any(parameter.dim() == 2 for parameter in module.parameters(recurse=False))
    linear = any(isinstance(child, nn.Linear) for child in module.children())
    return [Skipped(name or type(module).__name__, reason)] if own or linear else []


class ModuleValues:
    """What is known about the values of a traced module: its submodules, parameters and buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a `call_module` node calls."""
        found = self._find(node) if node.op == "call_module" else None
        return found if isinstance(found, nn.Module) else None

    def tensor(self, node: fx.Node) -> Tensor | None:
        """The tensor behind a `get_attr` node."""
        found = self._find(node) if node.op == "get_attr" else None
        return found if isinstance(found, Tensor) else None

    def is_parameter(self, node: fx.Node) -> bool | None:
        """None: the call knows, for parameters may be replaced."""
        return None

    def _find(self, node: fx.Node) -> Any:
        found: Any = self._root
        for part in str(node.target).split("."):
            found = getattr(found, part, None)
        return found


_STATE = "_epigemm_state"
_OTHER_ARGUMENTS = "it is called with other arguments than tensors for those without a default"


class _State:
    """What a fused module runs; neither copied nor pickled."""

    def __init__(
        self, name: str, plans: list[Plan], kind: type, names: frozenset[str], keep_packs: bool
    ) -> None:
        self.name = name
        self.plans = plans
        self.kind = kind
        self.keep_packs = keep_packs
        self.rest = Rest()
        self._names = names
        self._accepted: dict[type, bool] = {}

    def accepts(self, kind: type) -> bool:
        """Whether a module of this class, derived from the fused one, has the same forward: FSDP makes such."""
        known = self._accepted.get(kind)
        if known is None:
            ancestors = kind.__mro__
            added = ancestors[: ancestors.index(self.kind)] if self.kind in ancestors else ancestors
            names = self._names | {"forward", "__getattr__", "__getattribute__"}
            known = self.kind in ancestors and not any(names & vars(ancestor).keys() for ancestor in added)
            self._accepted[kind] = known
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _fused_class(base: Any) -> Any:
    """A subclass of `base` with a fused forward, for one module: torch.compile counts what it compiled by code."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State | None = self.__dict__.get(_STATE)
        if state is None:  # an instance that was not fused itself
            return base.forward(self, *args, **kwargs)
        eager = not _is_compiling() and not watchers
        if eager and sleep.deep:
            return base.forward(self, *args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()), None)
        if eager and state.rest.left and state.rest.lasts(first):
            sleep.deep = True
            try:
                return base.forward(self, *args, **kwargs)
            finally:
                sleep.deep = False
        before = Fused.calls
        if not state.plans:
            result = base.forward(self, *args, **kwargs)
            if eager and Fused.calls == before:
                state.rest.begin(first)
            return result
        reasons = []
        if type(self) is not state.kind and not state.accepts(type(self)):
            reasons.append("its class has changed")
        else:
            for plan in state.plans:
                inputs = plan.signature.bind(args, kwargs)
                broken = _OTHER_ARGUMENTS if inputs is None else plan.guard.why_broken(self)
                if inputs is not None and not broken:
                    if _is_compiling():
                        return plan.run_compiled(self, *inputs)
                    result = plan.run(self, *inputs)
                    if eager and Fused.calls == before:
                        state.rest.begin(first)
                    return result
                reasons.append(broken)
        if not _is_compiling():
            # Of the plan for the other mode it is no news that it is for the other mode.
            tell_watchers(
                state.name or base.__name__, min(reasons, key=lambda reason: "training is" in reason)
            )
        return base.forward(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Copies and pickles are made as the original, and fused anew when they have their state.
        reduced = base.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        made, arguments, *rest = reduced
        state = self.__dict__.get(_STATE)
        if made is copyreg.__newobj__ and arguments[0] is type(self) and state is not None and any(rest[:1]):  # type: ignore[attr-defined]
            return _unfinished, (base, state.name, state.keep_packs, *arguments[1:]), *rest
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            made = _instance  # pickle insists that the other one makes the object's own class
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        return base if made is type(self) else made, arguments, *rest

    kind: list[Any] = []
    body = {
        "forward": codegen.own_code(forward),
        "__reduce_ex__": __reduce_ex__,
        "_epigemm_original": base,
        "_epigemm_fused": kind,
        "__module__": __name__,
        "__doc__": base.__doc__,
    }
    kind.append(type(base)(f"Fused{base.__name__}", (base,), body))
    return kind[0]


def _instance(base: Any, *args: Any) -> Any:
    """A module that `__init__` has not seen."""
    return base.__new__(base, *args)


def _unfinished(base: Any, name: str, keep_packs: bool, *args: Any) -> nn.Module:
    """A module without a state, which is fused as soon as it gets one."""

    def __setstate__(self: Any, state: Any) -> None:
        self.__class__ = base
        self.__setstate__(state)
        self.__dict__.pop(_STATE, None)
        _fuse_one(name, self, set(), act=True, keep_packs=keep_packs)
        _oversee(self, keep_packs=keep_packs)

    made: nn.Module = base.__new__(base, *args)
    object.__setattr__(made, "__class__", type(base)(base.__name__, (base,), {"__setstate__": __setstate__}))
    return made


__all__ = ["FusedSite", "FusionReport", "Plan", "fuse", "unfuse"]
