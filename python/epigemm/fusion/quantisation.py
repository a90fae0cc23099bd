"""Results that are quantised: divided by a scale, saturated, and cast to e4m3, as calls with `out_scale` do."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx

from epigemm.arguments.calls import EIGHT_BITS
from epigemm.fusion.operands import Quantisation, Region
from epigemm.fusion.values import known, only_reader, tensor_of, value_at

_E4M3 = EIGHT_BITS[0]
_LARGEST = torch.finfo(_E4M3).max
# Their signatures with two operands alone: `torch.div` also rounds.
_DIVISIONS: tuple[Any, ...] = ("div", "div_", "__truediv__", operator.truediv, torch.div, torch.true_divide)
_CLAMPS: tuple[Any, ...] = ("clamp", "clip", "clamp_", torch.clamp, torch.clip, torch.clamp_)
_CASTS: tuple[Any, ...] = ("to", torch.Tensor.to)
_DIVIDE = inspect.signature(lambda input, other: None)
_CLAMP = inspect.signature(lambda input, min, max: None)
_CAST = inspect.signature(lambda input, dtype: None)


def quantisation_of(node: fx.Node, region: Region) -> Quantisation | None:
    """The quantisation, behind a product of 8 bits, that begins with a node; None if a call has no such result.

    Beside results of 8 bits operands are bf16 or fp32.
    """
    if region.product.value.dtype == torch.float16:
        return None
    divided = _bound(node, _DIVISIONS, _DIVIDE)
    if divided is None:
        clamp = _clamp_before(node, least=0)
        is_member = clamp in region.members and value_at(clamp).dtype == torch.float32
        return Quantisation((node,), 1.0) if is_member else None
    clamp = only_reader(node)
    cast = None if clamp is None else only_reader(clamp)
    if clamp is None or cast is None or _clamp_before(cast, least=_LARGEST) is not clamp:
        return None
    return Quantisation((node, clamp, cast), divided["other"]) if _is_by_scale(divided, region) else None


def _is_by_scale(divided: dict[str, Any], region: Region) -> bool:
    """Whether a member in fp32 is divided by a tensor of one number; by others the epilogue divides."""
    value, scale = divided["input"], tensor_of(divided["other"])
    if value not in region.members or divided["other"] in region.members or scale is None:
        return False
    are_fp32 = value_at(value).dtype == scale.dtype == torch.float32
    return are_fp32 and known(scale.numel() == 1) and scale.device == region.product.value.device


def _clamp_before(cast: fx.Node, *, least: float) -> fx.Node | None:
    """The clamp of which a node is the cast to e4m3, if it saturates there, beyond -least and least."""
    arguments = _bound(cast, _CASTS, _CAST)
    clamp = arguments["input"] if arguments is not None and arguments["dtype"] is _E4M3 else None
    bounds = _bound(clamp, _CLAMPS, _CLAMP) if isinstance(clamp, fx.Node) else None
    ends: list[Any] = [] if bounds is None else [bounds["min"], bounds["max"]]
    if not ends or not all(isinstance(each, (int, float)) for each in ends):
        return None
    fits = -_LARGEST <= ends[0] <= -least and least <= ends[1] <= _LARGEST
    return clamp if fits else None


def _bound(node: fx.Node, targets: tuple[Any, ...], signature: inspect.Signature) -> dict[str, Any] | None:
    """The arguments of a call of one of these functions or methods."""
    if node.target not in targets:
        return None
    try:
        return signature.bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return None
