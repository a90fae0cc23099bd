"""`fuse` and `unfuse`: a model's modules get fused forwards, and keep everything else that they have.

Each module whose forward holds a chain changes its class to a subclass of it that differs in `forward` alone: names,
parameters, buffers, hooks, `isinstance` and state dicts stay as they are. That forward runs the rewritten
graph where its guard holds, and otherwise the one of the original class.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from epigemm import checks
from epigemm.fusion import codegen
from epigemm.fusion.guards import Guard
from epigemm.fusion.report import FusedSite, FusionReport, Skipped
from epigemm.fusion.rewrite import fuse_graph
from epigemm.fusion.site import tell_watchers
from epigemm.fusion.tracing import Signature, Trace, Untraceable, trace

_is_compiling = torch.compiler.is_compiling
_Model = TypeVar("_Model", bound=nn.Module)

# Wrappers that move, shard or replace the parameters of what is inside, by the names in their classes' history.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


@overload
def fuse(model: _Model, inplace: bool = False, dry_run: Literal[False] = False) -> _Model: ...
@overload
def fuse(model: nn.Module, inplace: bool = False, *, dry_run: Literal[True]) -> FusionReport: ...
def fuse(model: Any, inplace: bool = False, dry_run: bool = False) -> Any:
    """A model whose linear layers are fused with what follows them, wherever epigemm has an epilogue for it.

    Matches `model(...)`: the same values within rounding, types, gradients and side effects. What is found in each
    module's forward is told by `fusion_report`. Calls for which a fused kernel would give another result (hooks,
    BatchNorm in training mode, mixed dtypes, changed attributes, ...) run as they did before; `epigemm.fusion.watch`
    shows which. Parameters and buffers are the same objects under the same names.

    Args:
        model: any module. Its forwards run once or twice on stand-ins for tensors.
        inplace: change `model` itself instead of a copy that shares its parameters and buffers.
        dry_run: change nothing, and return the report alone.

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
    if dry_run:
        return _fuse_all(model, act=False)
    if not inplace:
        copied = _copied(model)
        if isinstance(copied, str):
            report = FusionReport(
                skipped=[Skipped(type(model).__name__, f"{copied}; accepted is inplace=True")]
            )
            model.fusion_report = report
            return model
        model = copied
    unfuse(model)
    model.fusion_report = _fuse_all(model, act=True)
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
        kind: Any = type(module)
        if "_epigemm_original" in vars(kind):
            module.__class__ = kind._epigemm_original
        for name in (_STATE, "fusion_report"):
            module.__dict__.pop(name, None)
    return model


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; accepted is a torch.nn.Module")


# --- the modules of a model -------------------------------------------------------------------------------------------


def _fuse_all(model: nn.Module, *, act: bool) -> FusionReport:
    report = FusionReport()
    inlined: set[int] = set()
    for name, module, reason in _candidates(model):
        if reason:
            report.skipped.append(Skipped(name or type(module).__name__, reason))
            continue
        found = _fuse_one(name, module, inlined, act=act)
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
        wrapper = _WRAPPERS.intersection(ancestor.__name__ for ancestor in kind.__mro__)
        if wrapper:
            inside_wrapper.update(id(child) for child in module.modules())
            yield name, module, f"inside {min(wrapper)}; accepted is to fuse the model before it is wrapped"
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
    """A fused forward, and when it may run."""

    signature: Signature
    guard: Guard
    run: Callable[..., Any]


def _fuse_one(name: str, module: nn.Module, inlined: set[int], *, act: bool) -> FusionReport:
    """Fuse one module's forward; what the report says of the children in `inlined` is in it."""
    report = FusionReport()
    plans: list[Plan] = []
    modes: list[bool | None] = [None]
    for training in modes:
        try:
            traced = trace(module, training)
        except Untraceable as error:
            report.skipped += _untraceable(name, module, str(error))
            continue
        if training is None and traced.guard.reads_training():
            modes += [False, True]  # a forward for each: the mode changes at will
        plan = _plan(name, module, traced, report)
        inlined |= traced.inlined
        if plan is not None:
            plans.append(plan)
    if plans and act:
        try:
            module.__class__ = _fused_class(type(module))
            module.__dict__[_STATE] = _State(name, plans)
        except TypeError as error:
            return FusionReport(
                skipped=[Skipped(name or type(module).__name__, f"its class cannot change: {error}")]
            )
    return report


def _plan(name: str, module: nn.Module, traced: Trace, report: FusionReport) -> Plan | None:
    found = fuse_graph(traced.graph, ModuleValues(module), name)
    report.add(found)
    if not found.sites:
        return None
    return Plan(
        traced.signature, traced.guard, codegen.function(traced.graph, f"{type(module).__name__}.forward")
    )


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

    def __init__(self, name: str, plans: list[Plan]) -> None:
        self.name = name
        self.plans = plans

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_fused_classes: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def _fused_class(base: Any) -> Any:
    """The subclass of `base` with fused forwards; each module has its own plans."""
    known = _fused_classes.get(base)
    if known is not None:
        return known

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State = self.__dict__[_STATE]
        reasons = []
        for plan in state.plans:
            inputs = plan.signature.bind(args, kwargs)
            broken = _OTHER_ARGUMENTS if inputs is None else plan.guard.why_broken(self)
            if inputs is not None and not broken:
                return plan.run(self, *inputs)
            reasons.append(broken)
        if not _is_compiling():
            # Of the plan for the other mode it is no news that it is for the other mode.
            tell_watchers(
                state.name or base.__name__, min(reasons, key=lambda reason: "training is" in reason)
            )
        return base.forward(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)
        # Copies and pickles are made as the original, and fused anew when they have their state.
        if reduced[0] is copyreg.__newobj__ and reduced[1][0] is type(self):  # type: ignore[attr-defined]
            return _unfinished, (base, self.__dict__[_STATE].name, *reduced[1][1:]), *reduced[2:]
        return reduced

    body = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "_epigemm_original": base,
        "__module__": __name__,
        "__doc__": base.__doc__,
    }
    made = _fused_classes[base] = type(base)(f"Fused{base.__name__}", (base,), body)
    return made


def _unfinished(base: Any, name: str, *args: Any) -> nn.Module:
    """A module without a state, which is fused as soon as it gets one."""

    def __setstate__(self: Any, state: Any) -> None:
        self.__class__ = base
        self.__setstate__(state)
        self.__dict__.pop(_STATE, None)
        _fuse_one(name, self, set(), act=True)

    made: nn.Module = base.__new__(base, *args)
    object.__setattr__(made, "__class__", type(base)(base.__name__, (base,), {"__setstate__": __setstate__}))
    return made


def _copied(model: nn.Module) -> nn.Module | str:
    """A copy with the same tensors; or why there is none."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if _WRAPPERS.intersection(ancestor.__name__ for ancestor in type(module).__mro__):
            return f"it holds a {type(module).__name__}, which cannot be copied"
        for values in (module._parameters, module._buffers, vars(module)):
            memo.update((id(value), value) for value in values.values() if isinstance(value, Tensor))
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the model's attributes raise
        return f"it cannot be copied ({type(error).__name__}: {error})"


__all__ = ["FusedSite", "FusionReport", "Plan", "fuse", "unfuse"]
