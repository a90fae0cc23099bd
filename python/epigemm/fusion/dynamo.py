"""The torch.compile backend "epigemm": rewrites Dynamo's graphs (`rewrite`), then another backend compiles them."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from epigemm import compilers
from epigemm.arguments import checks
from epigemm.fusion.report import FusionReport
from epigemm.fusion.rewrite import first_line, fuse_module, warn_once

_log = logging.getLogger(__name__)
INDUCTOR = "inductor"
# Of these each operator has kernels of its own: no compiler makes one kernel of several operators.
_ONE_BY_ONE = ("eager", "aot_eager", "cudagraphs")


class Settings(NamedTuple):
    """The options of the backend. Called with a graph and its inputs, it is the backend.

    Attributes:
        inner: the backend that compiles the rewritten graph: its name or a callable.
        compiler: that backend, for Inductor with its mode and options.
        strict: whether errors of rewriting and compiling are raised.
        report: called with the report of each graph.
    """

    inner: Any
    compiler: Callable[..., Any]
    strict: bool
    report: Callable[[FusionReport], Any] | None

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrite and compile a graph, and report."""
        start = time.perf_counter()
        report = self.rewrite(graph_module)
        report.notes += _at_the_limit()
        compiled = self._compiled(graph_module, example_inputs, report)
        report.seconds = time.perf_counter() - start
        _log.info("%s", report)
        if self.report is not None:
            self.report(report)
        return compiled

    def rewrite(self, graph_module: fx.GraphModule) -> FusionReport:
        """Rewrite a graph in place, for the inner backend."""
        modes = {"one_by_one": self.inner in _ONE_BY_ONE, "traced": self.inner != "eager"}
        return fuse_module(graph_module, strict=self.strict, **modes)

    def _compiled(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], report: FusionReport
    ) -> Callable[..., Any]:
        is_inductor = self.inner == INDUCTOR
        was = copy.deepcopy(graph_module.graph) if is_inductor else None  # Inductor changes the graph
        try:
            compiled: Callable[..., Any] = self.compiler(graph_module, list(example_inputs))
            return compiled
        except Exception as error:  # any error of Inductor: no compiler, no Triton, one of its own
            if was is None or self.strict or compilers.is_request(error):
                raise
            reason = f"Inductor failed on it, and it runs operator by operator: {first_line(error)}"
        warn_once(f"a graph of a fused model: {reason}")
        report.notes.append(f"a graph: {reason}")
        graph_module.graph = was
        return graph_module.forward


def epigemm_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs: `torch.compile(model, backend="epigemm")`.

    A matrix product and the pointwise operators that follow it become one call of epigemm. Another backend compiles the
    resulting graph. If Inductor fails on it, it runs operator by operator, with one warning, and the report says why.

    Args:
        graph_module: Dynamo's graph; it is rewritten in place.
        example_inputs: its inputs.
        mode: as of torch.compile with Inductor.
        options: "backend": the backend that compiles the resulting graph, a name that torch.compile accepts or a
            callable (default: "inductor"); "eager" runs it operator by operator, without a compiler. "mode": as the
            argument, because torch.compile takes either a mode or options. "report": called with the `FusionReport` of
            every graph; "strict": True has errors raised, of epigemm's rewriting and of Inductor. All others are
            Inductor's.

    Returns:
        The compiled graph.

    Raises:
        TypeError: `options` is no dict, "backend" neither a name nor callable, "report" not callable, or "strict"
            neither True nor False.
        ValueError: options or a mode of Inductor's are given with another backend.
        RuntimeError: Inductor has no such mode or option; or rewriting the graph failed, and "strict" is True (the
            original error is its cause). torch.compile raises it as a `BackendCompilerFailed`.

    Example:
        >>> reports = []
        >>> compiled = torch.compile(model, backend="epigemm", options={"report": reports.append})
    """
    return settings_of(mode, options)(graph_module, example_inputs)


def settings_of(mode: str | None, options: dict[str, Any] | None) -> Settings:
    """The settings; TypeError, ValueError or torch's RuntimeError for a wrong one."""
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options: got {type(options).__name__}; accepted is a dict or None")
    given = dict(options or {})
    inner, report = given.pop("backend", INDUCTOR), given.pop("report", None)
    mode = given.pop("mode", None) or mode
    if report is not None and not callable(report):
        raise TypeError(f"options['report']: got {type(report).__name__}; accepted is a callable")
    strict = checks.flag("options['strict']", given.pop("strict", False))
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(
            f"options['backend']: got {type(inner).__name__}; accepted is a name of torch.compile's, or a callable"
        )
    if inner == INDUCTOR:
        return Settings(inner, compilers.inductor(mode, given), strict, report)
    if mode or given:
        names = ", ".join(["mode"] * bool(mode) + sorted(given))
        raise ValueError(f"options: got {names} for backend {inner!r}; accepted with Inductor alone")
    return Settings(inner, compilers.backend_of(inner), strict, report)


def _at_the_limit() -> list[str]:
    """A note, with a warning, where Dynamo will compile the function at hand no more."""
    now, limit = torch._guards.CompileContext.current_compile_id(), torch.compiler.config.recompile_limit
    if now is None or now.frame_compile_id != limit - 1:  # it counts from 0
        return []
    note = (
        f"Dynamo has compiled a function {limit} times, which is its limit "
        "(torch.compiler.config.recompile_limit): calls that need another graph run as they were, not fused"
    )
    warn_once(f"a graph of a fused model: {note}")
    return [note]
