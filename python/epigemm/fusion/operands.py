"""A chain's nodes as steps of a formula, and what they read beside the product as operands."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.graph import _parse_stack_trace

from epigemm.arguments import checks
from epigemm.epilogues.kinds import MATRIX, PER_COLUMN, PER_ROW, SCALAR
from epigemm.fusion.formula import ChainFormula, prelu
from epigemm.fusion.matmuls import Product
from epigemm.fusion.values import (
    in_order,
    is_contiguous,
    known,
    lies_in_order,
    order_of,
    same_sizes,
    tensor_of,
    value_at,
)

_LARGEST = 2.0**60
_NORM = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True)
class ChainOperand:
    """A tensor or number that the chain reads beside the product, or a BatchNorm by its running statistics.

    Attributes:
        sources: its node; of a BatchNorm the nodes of four vectors or None, from which two are folded.
        order: the order of its axes for the call; None: unchanged.
        shared: whether it is a matrix with 1 in place of the last leading axes of what it is read beside.
        eps: of a BatchNorm, which is two vectors; None: it is none.
    """

    kind: str
    sources: tuple[fx.Node | None, ...]
    order: tuple[int, ...] | None = None
    shared: bool = False
    eps: float | None = None


class Quantisation(NamedTuple):
    """What casts a value to 8 bits.

    Attributes:
        nodes: the cast; or a division of the value, a clamp, and the cast.
        scale: by which it is divided: a number, or a tensor of one.
    """

    nodes: tuple[fx.Node, ...]
    scale: fx.Node | float


class Refused(Exception):
    """The error: why a node is not part of a chain."""


@dataclass
class Region:
    """The nodes that could be in a product's chain, before its end is known.

    Attributes:
        members: nodes whose values are functions of the product's elements.
        views: members with the same elements in the same memory, in another shape or with reordered axes.
        idle: members that give back their argument, as a dropout in eval mode, which Dynamo does not note.
        arithmetic: members that compute something: no views, no idle ones, no casts.
        refused: nodes that read a member but are not members, with the reasons.
        quantised: members that quantise others, by each of their nodes.
    """

    product: Product
    members: dict[fx.Node, None] = field(default_factory=dict)
    views: set[fx.Node] = field(default_factory=set)
    idle: set[fx.Node] = field(default_factory=set)
    arithmetic: set[fx.Node] = field(default_factory=set)
    refused: dict[fx.Node, str] = field(default_factory=dict)
    quantised: dict[fx.Node, Quantisation] = field(default_factory=dict)

    def carried(self, node: fx.Node) -> list[fx.Node]:
        """The members that a node reads."""
        return [n for n in node.all_input_nodes if n in self.members]


def formula_of(
    region: Region, nodes: tuple[fx.Node, ...], *, alone: bool = False
) -> tuple[ChainFormula, tuple[ChainOperand, ...], tuple[Any, ...] | None]:
    """The formula of some members of a region, the product first; or of one `alone`, to which each is the product.

    With it the operands, and the leading sizes of what matrices that share rows are read beside, if there are any.
    """
    maker = _Maker(region, alone)
    for node in nodes:
        maker.add(node)
    maker.graph.output(maker.result)
    lead = None if maker.lead is None else tuple(maker.lead)
    return ChainFormula(tuple(maker.kinds), maker.graph), tuple(maker.operands), lead


class _Maker:
    """Collects steps and operands."""

    def __init__(self, region: Region, alone: bool) -> None:
        self._region, self._alone, self._product = region, alone, region.product.value
        self.operands: list[ChainOperand] = []
        self.kinds: list[str] = []
        self.graph = fx.Graph()
        self.result = self._acc = self.graph.placeholder("acc")
        self._values: dict[fx.Node, fx.Node] = {}
        self._read: dict[ChainOperand, fx.Node] = {}
        self.lead: list[Any] | None = None  # the leading sizes beside which matrices share rows

    def add(self, node: fx.Node) -> None:
        """Add a member."""
        product = self._region.product
        if node is product.node:
            made = self._scaled(self._acc, product.alpha)
            if product.bias is not None:
                bias = self._operand(product.bias, self._product)
                made = self._step(node, torch.add, (made, self._scaled(bias, product.beta)))
        elif node in self._region.views or node in self._region.idle:
            made = self._member(node, self._region.carried(node)[0])
        elif node.target is F.batch_norm:
            made = self._norm(node)
        else:
            value = value_at(node)
            shape = value_at(self._region.carried(node)[0])
            # Leave it to PyTorch where its types overflow.
            most = min(_LARGEST, torch.finfo(self._product.dtype).max)
            args, kwargs = _substituted(
                (node.args, tuple(node.kwargs.items())),
                lambda n: self._member(node, n) if n in self._region.members else self._operand(n, shape),
                most,
            )
            # An epilogue computes in fp32 where PyTorch computes in the product's type or in fp32.
            wide = not value.is_floating_point() or value.dtype in (self._product.dtype, torch.float32)
            target = prelu if _is_prelu_of_columns(node, shape) else node.target
            made = self._step(node, target, args, dict(kwargs), None if wide else value.dtype)
            if self._alone and value.dtype == torch.bool:  # only the end of a chain needs a type of its own
                made = self._step(node, torch.where, (made, self._acc, 0.0))
        self.result = self._values[node] = made

    def _member(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        if not self._alone:
            return self._values[node]
        is_condition = value_at(node).dtype == torch.bool
        return self._step(reader, torch.gt, (self._acc, 0.0)) if is_condition else self._acc

    def _operand(self, node: fx.Node, beside: Tensor) -> fx.Node:
        product = self._product
        value = tensor_of(node)
        if value is None:
            raise Refused(f"{node} is a size or another number that changes from call to call")
        order = order_of(beside)
        if order == tuple(range(beside.dim())):
            order = None
        kind = kind_of(value, beside, product) if order is None else _kind_in(order, value, beside, product)
        if kind is None:
            shape = [int(size) if isinstance(size, int) else str(size) for size in value.shape]
            text = f"{node}, {str(value.dtype).removeprefix('torch.')} {shape}, is no operand"
            ones = next((axis for axis, size in enumerate(value.shape) if not known(size == 1)), 0)
            axes = value.dim() - ones
            # A copy of it for each batch would be written and read, as the sum is.
            is_repeated = 1 < axes < beside.dim() and same_sizes(value.shape[ones:], beside.shape[-axes:])
            raise Refused(f"{text}; to repeat it takes as long as to add it" if is_repeated else text)
        padded = (*(1,) * (beside.dim() - value.dim()), *value.shape)
        shared = kind == MATRIX and not same_sizes(padded, beside.shape)
        if shared and self._region.product.ends is not None:
            raise Refused(f"{node} is repeated along rows, which are in groups")
        if shared:  # the call has one list of their leading sizes
            lead = in_order(beside.shape, order or range(beside.dim()))[:-1]
            if self.lead is not None and not same_sizes(self.lead, lead):
                raise Refused(f"{node} is repeated along other axes than an operand before it")
            self.lead = lead
        operand = ChainOperand(kind, (node,), order if kind in (PER_ROW, MATRIX) else None, shared)
        if operand not in self._read:
            self.operands.append(operand)
            self._read[operand] = self._new(kind)
        return self._read[operand]

    def _new(self, kind: str) -> fx.Node:
        self.kinds.append(kind)
        return self.graph.placeholder(kind)

    def _step(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any = None, dtype: torch.dtype | None = None
    ) -> fx.Node:
        made = self.graph.create_node(
            "call_method" if isinstance(target, str) else "call_function", target, args, kwargs
        )
        place = _parse_stack_trace(node.stack_trace or "")
        made.meta = {"dtype": dtype, "line": f"{place.file}:{place.lineno}" if place else ""}
        return made

    def _scaled(self, value: fx.Node, factor: float) -> fx.Node:
        if factor == 1:
            return value
        factor = _substituted(factor, lambda _: value, min(_LARGEST, torch.finfo(self._product.dtype).max))
        return self._step(self._region.product.node, torch.mul, (value, factor))

    def _norm(self, node: fx.Node) -> fx.Node:
        """multiplier * z + offset."""
        if self._region.product.ends is not None:
            raise Refused(f"{node} is a BatchNorm of rows in groups")
        origin, norm = _norm_of(node, self._region)
        self.operands.append(norm)
        multiplier, offset = self._new(PER_COLUMN), self._new(PER_COLUMN)
        scaled = self._step(node, torch.mul, (multiplier, self._member(node, origin)))
        return self._step(node, torch.add, (scaled, offset))


def _is_prelu_of_columns(node: fx.Node, beside: Tensor) -> bool:
    """Whether a node is a PReLU with one slope, or one for each column; refused: others."""
    if node.target not in (torch.prelu, "prelu"):
        return False
    slope = node.kwargs.get("weight", node.args[-1])
    assert isinstance(slope, fx.Node)
    if beside.dim() != 2 and not known(value_at(slope).numel() == 1):
        raise Refused(f"{node} has slopes along the second axis")
    return True


def _substituted(part: Any, of_node: Callable[[fx.Node], fx.Node], most: float) -> Any:
    """An argument with its nodes replaced; `most`: the largest number."""
    if isinstance(part, fx.Node):
        return of_node(part)
    if isinstance(part, complex) or (isinstance(part, (int, float)) and not abs(part) <= most):
        raise Refused(f"{part!r:.12} is beyond what the product's type holds")
    if isinstance(part, slice):
        raise Refused("an index selects some of its elements")
    if isinstance(part, (tuple, list)) and not isinstance(part, torch.Size):
        return tuple(_substituted(each, of_node, most) for each in part)
    return part


def kind_of(value: Tensor, beside: Tensor, product: Tensor) -> str | None:
    """The kind of an operand for an epilogue, next to a value `beside`; None if it cannot be one."""
    if value.dim() == 0 and beside.dtype == torch.float32 and value.is_floating_point():
        return SCALAR if value.device == product.device else None
    return _kind_of(value, value.shape, beside.shape, product)


def _kind_in(order: tuple[int, ...], value: Tensor, beside: Tensor, product: Tensor) -> str | None:
    """The kind of an operand next to a view of the product with reordered axes.

    The call computes in the product's order. A matrix must have this order, too, or it would be copied. Vectors along
    the rows are copied.
    """
    lacking = beside.dim() - value.dim()
    if lacking < 0 or value.dim() == 0:
        return kind_of(value, beside, product)
    shape = in_order((*(1,) * lacking, *value.shape), order)
    result = in_order(beside.shape, order)
    if value.device == product.device and same_sizes(shape, result):
        strides = in_order((*(0,) * lacking, *value.stride()), order)
        if not lies_in_order(shape, strides):
            raise Refused("the other operand has its axes in another order")
    elif known(shape[-1] == 1) and not all(known(size == 1) for size in shape):
        # It is repeated along the leading axes, which is little memory for a vector.
        fits = all(known(size == 1) or known(size == full) for size, full in zip(shape, result, strict=True))
        if not fits or not same_sizes(result, product.shape):
            return None
        shape = [*result[:-1], 1]
    return _kind_of(value, shape, result, product)


def _kind_of(value: Tensor, shape: Sequence[Any], result: Sequence[Any], product: Tensor) -> str | None:
    if value.device != product.device or not value.is_floating_point():
        return None
    wide = product.dtype == torch.float32
    if value.dim() == 0:
        # PyTorch may round a 0-d tensor of another type to 16 bits first, or treat it as a number.
        return SCALAR if wide or value.dtype == product.dtype else None
    if value.dtype not in (product.dtype, torch.float32):
        return None
    if len(shape) > len(result):
        return None
    if all(known(size == 1) for size in shape):
        return SCALAR
    has_rows = same_sizes(result[-1:], product.shape[-1:])
    all_but_last = all(known(size == 1) for size in shape[:-1])
    if len(shape) == 1 or not same_sizes(shape, result):
        if has_rows and all_but_last and known(shape[-1] == result[-1]):
            return PER_COLUMN
        padded = (1,) * (len(result) - len(shape)) + tuple(shape)
        if has_rows and known(shape[-1] == 1) and same_sizes(padded[:-1], result[:-1]):
            return PER_ROW
    if same_sizes(shape, result) or (has_rows and _shares_rows(shape, result)):
        return MATRIX
    return None


def _shares_rows(shape: Sequence[Any], result: Sequence[Any]) -> bool:
    """Whether a shape is known to be the result's with 1 in place of its last leading axes."""
    kept = len(shape) - 1
    while kept > 0 and known(shape[kept - 1] == 1):
        kept -= 1
    return len(shape) == len(result) and same_sizes((*shape[:kept], shape[-1]), (*result[:kept], result[-1]))


# --- BatchNorm -------------------------------------------------------------------------------------------------------


def arguments_of(norm: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `F.batch_norm`, by name."""
    bound = inspect.signature(F.batch_norm).bind(*norm.args, **norm.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _norm_of(node: fx.Node, region: Region) -> tuple[fx.Node, ChainOperand]:
    given = arguments_of(node)
    origin, eps = given["input"], given["eps"]
    if given["training"] is not False or given["running_mean"] is None or given["running_var"] is None:
        raise Refused(f"{node} needs the batch's statistics")
    if region.product.scales is not None:
        raise Refused(f"{node} is a BatchNorm behind a product of 8 bits")
    product, value = region.product.value, value_at(node)
    is_rows = value.dim() == 2 and is_contiguous(value) and known(value.shape[-1] == product.shape[-1])
    if origin not in region.members or not is_rows:
        raise Refused(f"{node} is a BatchNorm of an input that is not [M, N]")
    if not isinstance(eps, float) or not 0 <= eps < math.inf:
        raise Refused(f"{node} has an eps that is no finite number, or negative")
    if not checks.is_folded(tensor_of(given["running_var"]), eps):
        raise Refused(f"{node} has an eps of {eps}, with which a variance of 0 gives infinities")
    vectors = [given[name] for name in _NORM]
    found = [tensor_of(vector) for vector in vectors if vector is not None]
    if any(each is None or kind_of(each, value, product) != PER_COLUMN or each.dim() != 1 for each in found):
        raise Refused(f"{node}: a vector of BatchNorm is not of the product's width, dtype or device")
    x = tensor_of(region.product.x)
    dtypes = {each.dtype for each in found if each is not None}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, None if x is None else x.dtype}:
        raise Refused(f"{node}: the vectors of BatchNorm are of other types")
    return origin, ChainOperand(PER_COLUMN, tuple(vectors), eps=eps)


def is_norm_alone(product: Product, formula: ChainFormula, operands: tuple[ChainOperand, ...]) -> bool:
    """Whether the chain is the product, its bias and one BatchNorm, for which epigemm has a function."""
    before = 0 if product.bias is None else 1
    norms = sum(each.eps is not None for each in operands)
    return norms == 1 and len(operands) == 1 + before and len(formula.steps) == 2 + before
