"""The torch.compile backend "epigemm": rewrites Dynamo's graphs (`rewrite`), then Inductor compiles them."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from epigemm.arguments import checks
from epigemm.fusion.host import Launches
from epigemm.fusion.rewrite import fuse_module
from epigemm.operators.compiled import for_inductor

_log = logging.getLogger(__name__)


def epigemm_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs: `torch.compile(model, backend="epigemm")`.

    A linear layer and the pointwise operators that follow it become one call of epigemm. Another backend compiles the
    resulting graph.

    Args:
        graph_module: Dynamo's graph; it is rewritten in place.
        example_inputs: its inputs.
        mode: as of torch.compile with Inductor.
        options: "backend": the backend that compiles the resulting graph, a name that torch.compile accepts or a
            callable (default: "inductor", where it works, else "aot_eager", with a warning); "report": called with the
            `FusionReport` of every graph; "keep_packs": True lets fp32 parameters keep their fp16 slices between calls,
            and is a promise to call `epigemm.pack(weight).repack()` after writes that torch does not count (those
            through `.data`); "strict": True has an error of epigemm's rewriting raised; otherwise there is a warning,
            and the original graph is compiled. All others are Inductor's.

    Returns:
        The compiled graph.

    Raises:
        TypeError: `options` is no dict, "report" not callable, or "keep_packs" or "strict" neither True nor False.
        ValueError: options or a mode of Inductor's are given with another backend.
        RuntimeError: rewriting the graph failed, and "strict" is True; the original error is its cause. torch.compile
            raises it as a `BackendCompilerFailed`.

    Example:
        >>> reports = []
        >>> compiled = torch.compile(model, backend="epigemm", options={"report": reports.append})
    """
    given = _checked(options)
    keep_packs, strict = given.pop("keep_packs", False), given.pop("strict", False)
    tell = given.pop("report", None)
    next_backend = given.pop("backend", None)
    if next_backend is None:
        next_backend = _default_backend(example_inputs)
    is_inductor = next_backend == "inductor"
    settings = {**(torch._inductor.list_mode_options(mode) if mode and is_inductor else {}), **given}
    launches = Launches.CUDA_GRAPH if next_backend == "cudagraphs" else Launches.EAGER
    if is_inductor:
        launches = Launches.INDUCTOR_GRAPH if settings.get("triton.cudagraphs") else Launches.INDUCTOR
    report = fuse_module(graph_module, strict=strict, keep_packs=keep_packs, launches=launches, traced=True)
    _log.info("%s", report)
    if tell is not None:
        tell(report)
    if is_inductor:
        from torch._inductor.compile_fx import compile_fx

        with for_inductor():
            compiled: Any = compile_fx(graph_module, list(example_inputs), config_patches=settings or None)
        return cast(Callable[..., Any], compiled)
    if next_backend != "aot_eager" and (mode or given):
        names = ", ".join(["mode"] * bool(mode) + sorted(given))
        raise ValueError(f"options: got {names} for backend {next_backend!r}; accepted with Inductor alone")
    compile_rest: Any = torch._dynamo.lookup_backend(next_backend)
    return cast(Callable[..., Any], compile_rest(graph_module, example_inputs))


def _checked(options: dict[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options: got {type(options).__name__}; accepted is a dict or None")
    given = dict(options or {})
    if "report" in given and not callable(given["report"]):
        raise TypeError(f"options['report']: got {type(given['report']).__name__}; accepted is a callable")
    for name in ("keep_packs", "strict"):
        checks.flag(f"options['{name}']", given.get(name, False))
    return given


def _default_backend(example_inputs: Sequence[Any]) -> str:
    reason = _why_no_inductor(any(isinstance(value, Tensor) and value.is_cuda for value in example_inputs))
    if not reason:
        return "inductor"
    warnings.warn(
        f"epigemm's backend leaves the rest of the graph to 'aot_eager', for Inductor does not work here: {reason}",
        stacklevel=2,
    )
    return "aot_eager"


def _why_no_inductor(cuda: bool) -> str:
    """What Inductor lacks on this machine; empty if nothing."""
    try:
        importlib.import_module("torch._inductor.compile_fx")
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch.utils._triton import has_triton

        return "" if (has_triton() if cuda else get_cpp_compiler()) else "there is no Triton"
    except (ImportError, RuntimeError) as error:  # an error of Inductor without a C++ compiler
        return str(error)
