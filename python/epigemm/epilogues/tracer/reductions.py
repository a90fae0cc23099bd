"""Reductions in a traced graph: of the whole `[M, N]`, along one axis, as results that nothing reads."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.epilogues.tracer import aten
from epigemm.epilogues.tracer.results import ACCEPTED, AMAX, AMIN, MEAN, SUM, VAR, Result

OPERATORS = {"sum": SUM, "mean": MEAN, "amax": AMAX, "amin": AMIN, "var": VAR, "var_mean": VAR}
"""Those that may be a result, by the name of the operator."""


class NotAResult(Exception):
    """Why a reduction is refused."""


def refuse(name: str) -> None:
    """Raises `NotAResult` for the name of an operator that is a reduction, and no result."""
    if name in aten.REDUCTIONS:
        raise NotAResult(f"{name} is a reduction; supported are {ACCEPTED}")


def refuse_reader(node: fx.Node) -> None:
    """Raises `NotAResult`, for a node that reads the reduction `node`."""
    name = name_of(node)
    raise NotAResult(
        f"{name} is a reduction, and its result is read; supported are {ACCEPTED}: read it in a second call"
    )


def name_of(node: fx.Node) -> str:
    """The name of a node's operator; of an element of a pair, that of the pair's."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def reduced(node: fx.Node, arguments: list[Any], whole: tuple[int, int], hints: Any) -> tuple[Result, ...]:
    """The results of a reduction, their values still to come: of `var_mean` two, of the others one.

    `arguments`: by the operator's schema; `whole`: the sizes of `[M, N]`; `hints`: a tensor's sizes.

    Raises:
        NotAResult: it is none of those that may be results.
    """
    name = name_of(node)
    source, axes, *_ = arguments if len(arguments) > 1 else (*arguments, None)
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or tuple(hints(value)) != whole:
        raise NotAResult(f"{name} is a reduction of a tensor that is not [M, N]; supported are {ACCEPTED}")
    axes = axes if isinstance(axes, (list, tuple)) else [] if axes is None else [axes]
    if len(axes) != 1:
        raise NotAResult(f"{name} is a reduction of all elements; supported are {ACCEPTED}")
    if not value.is_floating_point():
        raise NotAResult(
            f"{name} is a reduction of {value.dtype}; accepted are numbers, as of torch.where(condition, 1.0, 0.0)"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise NotAResult(
            f"{name} is a reduction of {value.dtype}; it is in fp32 (fp64 beside fp64): write float() before it"
        )
    by_name = {
        argument.name: given
        for argument, given in zip(node.target._schema.arguments, arguments, strict=False)  # type: ignore[union-attr]
    }
    if by_name.get("dtype") is not None:
        raise NotAResult(
            f"{name} is a reduction with a dtype; accepted is none: it is in fp32 (fp64 beside fp64)"
        )
    correction = by_name.get("correction", 0.0)
    correction = 1.0 if correction is None else float(correction)
    common = Result(0.0, OPERATORS[name], int(axes[0]) % 2, bool(by_name.get("keepdim", False)), correction)
    mean = replace(common, kind=MEAN, comes_with_var=True)
    found = (common, mean) if name == "var_mean" else (common,)
    return tuple(replace(each, is_fp32=value.dtype is torch.float32) for each in found)
