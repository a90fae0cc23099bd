"""`epigemm.fuse(model)`: a copy that shares the model's tensors and is compiled by the backend "epigemm"."""

from __future__ import annotations

import copy
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from epigemm import compilers
from epigemm.arguments import checks
from epigemm.explain.answer import Product
from epigemm.explain.log import Log
from epigemm.explain.state import kept
from epigemm.fusion.dynamo import Settings, settings_of
from epigemm.fusion.report import FusedSite, FusionReport
from epigemm.fusion.rewrite import warn_once
from epigemm.fusion.site import SITE, name_of

Model = TypeVar("Model", bound=nn.Module)

# Wrappers that move, shard or replace the parameters of the model inside, by the names of their classes and base
# classes.
_WRAPPERS = {
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
}
_CALL, _REPORT = "_compiled_call_impl", "fusion_report"
_numbers = itertools.count()


@overload
def fuse(
    model: Model,
    *,
    inplace: bool = ...,
    mode: str | None = ...,
    dynamic: bool | None = ...,
    options: dict[str, Any] | None = ...,
    strict: bool = ...,
    dry_run: Literal[False] = ...,
    example_inputs: None = ...,
) -> Model: ...


@overload
def fuse(
    model: nn.Module,
    *,
    inplace: bool = ...,
    mode: str | None = ...,
    dynamic: bool | None = ...,
    options: dict[str, Any] | None = ...,
    strict: bool = ...,
    dry_run: Literal[True],
    example_inputs: Sequence[Any] | Mapping[str, Any],
) -> FusionReport: ...


def fuse(
    model: Any,
    *,
    inplace: bool = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    strict: bool = False,
    dry_run: bool = False,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> Any:
    """Fuse the matrix products of a model with the pointwise operators that follow them.

    The result is what `model.compile(backend="epigemm", mode=mode, dynamic=dynamic, options=options)` makes, of a copy
    that shares the model's parameters and buffers. Its calls, recompilations, CUDA graphs and numerics are those of
    torch.compile. `fusion_report` of the result says what was fused in the graphs so far. `model.forward(...)` and
    other methods run as they were. Copies and pickles of a fused model are plain models.

    Args:
        model: the model.
        inplace: compile `model` itself, not a copy.
        mode: as of torch.compile: "reduce-overhead" launches CUDA graphs.
        dynamic: as of torch.compile.
        options: as of the backend: see `epigemm.fusion.dynamo.epigemm_backend`. `{"backend": "eager"}` runs the fused
            graphs operator by operator, without a compiler.
        strict: raise errors of epigemm's rewriting of a graph, and of the backend that compiles the rewritten graph.
            Otherwise there is a warning, the report names the error, and the graph runs without that step.
        dry_run: compile nothing and change nothing, and return the `FusionReport` of a call with `example_inputs`.
        example_inputs: for a dry run: the arguments of a call, as a sequence, or by name as a mapping.

    Returns:
        The fused model, or the report.

    Raises:
        TypeError: an argument of another type.
        ValueError: `mode` or `strict` differs from the option of that name; or a mode or options of Inductor's with
            another backend in `options`.
        RuntimeError: Inductor has no such mode or option.
        torch._dynamo.exc.BackendCompilerFailed: at a call: rewriting or compiling a graph failed, and `strict` is True.

    Example:
        >>> fused = epigemm.fuse(model)
        >>> y = fused(x)
        >>> print(fused.fusion_report)
    """
    _check_model(model)
    for name, value in {"inplace": inplace, "dry_run": dry_run, "strict": strict}.items():
        checks.flag(name, value)
    given = _joined(options, {"mode": mode, "strict": strict})
    # torch.compile removes this one from the options, whatever the backend.
    settings = settings_of(None, {name: each for name, each in given.items() if name != "guard_filter_fn"})
    if dry_run:
        return _dry_run(model, example_inputs, settings)
    if example_inputs is not None:
        raise TypeError("example_inputs: got some without dry_run=True; accepted is None")
    reason, target = why_not(model), model
    if not reason and not inplace:
        made = copied(model)
        if isinstance(made, str):
            reason = f"{made}; fuse(model, inplace=True) needs no copy"
        else:
            target = made
    if reason:
        vars(target)[_REPORT] = FusionReport(notes=[f"left alone: {reason}"])
        return target
    report = FusionReport(settings=settings)

    def tell(of_graph: FusionReport) -> None:
        report.add(of_graph)
        if settings.report is not None:
            settings.report(of_graph)

    given["report"] = tell
    call = torch.compile(call_of(target), backend="epigemm", dynamic=dynamic, options=given)
    vars(target).update({_CALL: call, _REPORT: report})
    return target


def unfuse(model: Model) -> Model:
    """Undo `fuse`, in place, also for modules inside the model. Modules that are not fused do not change.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> epigemm.unfuse(model)
    """
    _check_model(model)
    for module in model.modules():
        if is_fused(module):
            vars(module).pop(_CALL, None)
        if isinstance(vars(module).get(_REPORT), FusionReport):
            del vars(module)[_REPORT]
    return model


def is_fused(module: nn.Module) -> bool:
    """Whether a module itself is fused, and not left alone, nor a shallow copy of one, which runs as it is."""
    own = vars(module)
    return own.get(_CALL) is not None and getattr(own.get(_REPORT), "settings", None) is not None


def call_of(model: nn.Module) -> Callable[..., Any]:
    """A function to compile that makes the model's call.

    Dynamo does not begin to trace in torch's own code (`nn.Sequential`), and keeps its graphs by code object. So each
    model has a code object of its own, outside of torch.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    code = call.__code__.replace(co_name=f"call_{type(model).__name__}_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def _joined(options: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The options with some arguments among them; ValueError where both are given, and differ."""
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options: got {type(options).__name__}; accepted is a dict or None")
    given = dict(options or {})
    for name, value in arguments.items():
        if given.get(name, value) != value and value:
            raise ValueError(
                f"{name}: got {value!r} and options[{name!r}] {given[name]!r}; accepted is one of them"
            )
        given.setdefault(name, value)
    return given


def _dry_run(model: nn.Module, inputs: Any, settings: Settings) -> FusionReport:
    if not isinstance(inputs, (Sequence, Mapping)) or isinstance(inputs, str):
        raise TypeError(
            f"example_inputs: got {type(inputs).__name__}; accepted with dry_run=True is a sequence of the model's "
            "arguments, or a mapping of them by name"
        )
    report = FusionReport()
    if reason := why_not(model):
        return FusionReport(notes=[f"left alone: {reason}"])
    try:
        made, given = copied_apart((model, inputs))
    except Exception as error:  # any error of the model's attributes
        return FusionReport(notes=[f"left alone: it cannot be copied ({type(error).__name__}: {error})"])

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        report.add(settings.rewrite(graph_module))
        return graph_module.forward

    call = torch.compile(call_of(made), backend=backend)
    with kept(made):
        call(**given) if isinstance(given, Mapping) else call(*given)
    return report


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; accepted is a torch.nn.Module")


def why_not(model: nn.Module) -> str:
    """Why a model cannot be fused as a whole; empty where it can be tried."""
    if compilers.is_turned_off():
        warn_once("Dynamo is turned off (TORCHDYNAMO_DISABLE), and the model runs as it was")
        return "Dynamo is turned off (TORCHDYNAMO_DISABLE)"
    if inspect.isgeneratorfunction(model.forward):
        return "its forward is a generator, of which torch.compile compiles nothing"
    if vars(model).get(_CALL) is not None and not is_fused(model):
        return "it has been compiled already, by model.compile()"
    if hasattr(model, "_orig_mod"):
        return "it has been compiled already, by torch.compile"
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if found := names & _WRAPPERS:
            return f"it holds a {min(found)}, inside of which parameters move"
        if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)) and module is model:
            return f"it is a {type(module).__name__}"
    return ""


# --- copies ----------------------------------------------------------------------------------------------------------


def copied(model: nn.Module) -> nn.Module | str:
    """A copy with the same tensors, or why there is none."""
    memo: dict[int, Any] = {id(each): each for each in _shared_within(model, set())}
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:  # any error of the model's attributes
        return f"it cannot be copied ({type(error).__name__}: {error})"
    return _why_no_copy(model, made) or made


def copied_apart(value: Any) -> Any:
    """A copy of a model and what belongs to it that shares no memory with them."""
    memo: dict[int, Any] = {}
    for each in _shared_within(value, set()):
        if not isinstance(each, Tensor):
            memo[id(each)] = each
        elif not each.is_leaf:  # deepcopy refuses tensors with a history
            memo[id(each)] = each.detach().clone()
    return copy.deepcopy(value, memo)


def _shared_within(value: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors that can be reached from an object, also through modules and lists that are not registered.

    And each `object()`: a forward can only ask whether it is that very one.
    """
    if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor) or type(value) is object:
        yield value
    elif isinstance(value, dict):
        for part in list(value.values()):
            yield from _shared_within(part, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in list(value):
            yield from _shared_within(part, seen)
    elif hasattr(value, "__dict__"):
        yield from _shared_within(vars(value), seen)


def _why_no_copy(model: nn.Module, copied: Any) -> str:
    """What is wrong with a copy by a class's own `__copy__`; empty if it is a copy that shares every tensor."""
    if not isinstance(copied, nn.Module) or type(copied) is not type(model):
        return f"its copy is a {type(copied).__name__}"
    for kind in ("modules", "parameters", "buffers"):
        mine, other = (
            dict(getattr(each, f"named_{kind}")(remove_duplicate=False)) for each in (model, copied)
        )
        shares = kind != "modules"
        if list(mine) != list(other) or any((mine[name] is other[name]) is not shares for name in mine):
            return f"its copy {'does not share' if shares else 'shares, or has other,'} {kind}"
    return ""


# --- epigemm.explain of a fused model: its graphs, run node by node, so that each product has its layer's name --------


@contextmanager
def interpreted(model: nn.Module, log: Log) -> Iterator[None]:
    """Have calls of the fused modules in a model, or of the model itself if there is none, run their graphs so.

    Nothing is compiled. A module runs the graphs that it would have compiled.
    """
    modules = [each for each in model.modules() if is_fused(each)] or [model]
    was = [(vars(module), vars(module).get(_CALL)) for module in modules]
    calls = [_call_of(module, log) for module in modules]
    try:
        for module, call in zip(modules, calls, strict=True):
            vars(module)[_CALL] = call
        yield
    finally:
        for own, compiled in was:
            own[_CALL] = compiled


def _call_of(module: nn.Module, log: Log) -> Callable[..., Any]:
    settings: Settings = vars(module)[_REPORT].settings if is_fused(module) else settings_of(None, None)

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        report = settings.rewrite(graph_module)

        def run(*args: Any) -> Any:
            log.graphs += 1
            log.notes += [note for note in report.notes if note not in log.notes]
            with log:
                results = _Nodes(graph_module, report, log, log.name_of(module)).run(*args)
            log.node = None
            return results

        return run

    compiled = torch.compile(call_of(module), backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with log.closed():
            return compiled(*args, **kwargs)

    return call


class _Nodes(fx.Interpreter):
    """Runs each node with the log told of which product it is."""

    def __init__(self, graph_module: fx.GraphModule, report: FusionReport, log: Log, within: str) -> None:
        super().__init__(graph_module)
        self._log, self._within = log, within
        self._reasons = {each.name: each.reason for each in report.skipped}

    def run_node(self, node: fx.Node) -> Any:
        """As the interpreter."""
        if node.op not in ("call_function", "call_method"):
            return super().run_node(node)
        site: FusedSite | None = node.meta.get(SITE)
        if site is not None:
            product = Product(site.name, site.function, notes=(site.formula, *site.notes))
        else:
            name = name_of(node)
            product = Product(name, why=self._reasons.get(name, "fuse takes no product of this form"))
        named = f"{self._within}.{product.name}" if self._within else product.name
        self._log.node = replace(product, name=named)
        return super().run_node(node)
