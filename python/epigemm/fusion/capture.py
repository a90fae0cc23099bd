"""What follows a product as far as one epilogue computes it: the chain, and what it reads beside the product.

A chain begins with the product and ends with a node that alone is read by others. Between the two nothing is written
but the chain's own values, and no mode (gradients, autocast) changes: so the fused call may stand where the last node
stood, where all that the chain reads is ready.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm.epilogues import MATRIX, PER_COLUMN, PER_ROW, SCALAR
from epigemm.functor_source import FIRST_SLOT
from epigemm.fusion.effects import Watcher
from epigemm.fusion.formula import Formula, Slot, Step, epilogue_of
from epigemm.fusion.products import Product
from epigemm.fusion.values import is_contiguous, is_same_memory, known, same_sizes, storage_of, tensor_of
from epigemm.user_epilogue import UserEpilogue

_TAKEN = "it is a part of another chain"
_LARGEST = 2.0**60
_NORM = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True)
class Norm:
    """A BatchNorm that normalises by its running statistics: two vectors that are folded of up to four."""

    vectors: tuple[fx.Node | None, ...]
    eps: float


@dataclass(frozen=True)
class Operand:
    """Something that the chain reads beside the product."""

    kind: str
    source: fx.Node


@dataclass(frozen=True)
class Chain:
    """A product and what follows it.

    Attributes:
        product: the product.
        nodes: what the call replaces, the product first, the node with the result last.
        views: those among them that give the result its shape, in order.
        operands: what the epilogue reads; of a `Norm` two vectors.
        formula: of the product and the operands.
        epilogue: what it is made to; None: nothing follows the product but its bias, or one BatchNorm.
        ended: why the chain ends where it does; empty where nothing follows.
        is_followed: whether something pointwise follows the product, taken along or not.
    """

    product: Product
    nodes: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    operands: tuple[Operand | Norm, ...]
    formula: Formula
    epilogue: UserEpilogue | None
    ended: str = ""

    is_followed: bool = False

    @property
    def tail(self) -> fx.Node:
        """The node with the result."""
        return self.nodes[-1]


class Refused(Exception):
    """Why a node is no part of a chain."""


@dataclass
class _Region:
    """What could follow a product, before it is known where the chain ends.

    Attributes:
        members: nodes whose values are functions of the product's elements.
        views: those that give the same elements in another shape.
        order: each node's place in the graph.
        refused: why the others are none that read a member.
    """

    product: Product
    order: dict[fx.Node, int]
    members: dict[fx.Node, None] = field(default_factory=dict)
    views: set[fx.Node] = field(default_factory=set)
    refused: dict[fx.Node, str] = field(default_factory=dict)


class Capture:
    """Finds the chains of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._watcher = Watcher()
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            if (value := tensor_of(node)) is not None:
                self._sharing.setdefault(storage_of(value), []).append(node)
        self._taken: set[fx.Node] = set()

    def changes_shapes(self) -> bool:
        """Whether some node gives a tensor another shape in place: then the shapes that Dynamo noted are later ones."""
        return any(
            isinstance(node.target, str) and node.target.endswith("_") and self._watcher.effects(node).changes_shapes
            for node in self._order
            if node.op == "call_method"
        )

    def chain(self, product: Product) -> Chain:
        """The longest chain that begins with a product, and takes no node that another one has."""
        region = self._grow(product)
        ended = ""
        for tail in reversed([node for node in region.members if node not in region.views]):
            nodes = _needed(region, tail)
            if nodes is None:
                ended = ended or f"{_first_reader_outside(region)} reads a value in between"
                continue
            if tail is not product.node and not self._is_result(product, tail):
                continue
            try:
                made = self._made(region, nodes)
            except Refused as refusal:
                ended = str(refusal)
                continue
            self._taken.update(made.nodes)
            ended = "; ".join(dict.fromkeys(each for each in region.refused.values() if each != _TAKEN)) or ended
            is_followed = len(made.nodes) > 1 or self._is_followed(product.node)
            return replace(made, ended=ended, is_followed=is_followed)
        raise AssertionError("a product alone is a chain")

    def _is_followed(self, node: fx.Node) -> bool:
        """Whether something pointwise reads a node, or a view of it."""
        for user in node.users:
            value = tensor_of(user)
            if value is None or not known(value.numel() == _value(node).numel()):
                continue
            is_view = len(user.all_input_nodes) == 1 and _is_view(value, node)
            effects = self._watcher.effects(user)
            if effects.is_pointwise or (is_view and not effects.writes and self._is_followed(user)):
                return True
        return False

    # --- what may follow ---

    def _grow(self, product: Product) -> _Region:
        region = _Region(product, self._order)
        region.members[product.node] = None
        waiting = set(product.node.users)
        node = product.node.next
        while waiting and node.op != "output":
            effects = self._watcher.effects(node)
            if node in waiting:
                waiting.discard(node)
                reason = self._why_not(region, node)
                if not reason:
                    region.members[node] = None
                    waiting.update(node.users)
                else:
                    region.refused[node] = reason
            if node not in region.members and not effects.is_pure:
                what = "writes to memory" if effects.writes else "may change a mode or write to memory"
                region.refused.setdefault(node, f"{_label(node)} {what}")
                break
            node = node.next
        return region

    def _why_not(self, region: _Region, node: fx.Node) -> str:
        """Why a node that reads members is no part of the chain; empty where it is one."""
        if node in self._taken:
            return _TAKEN
        value, effects = tensor_of(node), self._watcher.effects(node)
        if value is None or not effects.known:
            return f"{_label(node)} is not known to be pointwise"
        carried = [n for n in node.all_input_nodes if n in region.members]
        if value.is_floating_point() and region.product.value.requires_grad and not value.requires_grad:
            return f"{_label(node)} ends a derivative"
        if effects.writes and not self._may_write(region, node, carried, effects.writes):
            return f"{_label(node)} writes to memory that others read"
        if len(carried) == 1 and not effects.writes and _is_view(value, carried[0]):
            region.views.add(node)
            return ""
        if not is_contiguous(value) or not all(same_sizes(value.shape, _value(n).shape) for n in carried):
            return f"{_label(node)} gives a result of another shape"
        try:
            formula, _ = _formula_of(region, (node,), alone=True)
        except Refused as refusal:
            return str(refusal)
        if formula is not None:
            made = epilogue_of(formula)
            if isinstance(made, str):
                return f"{_label(node)}: {made}"
        return ""

    def _may_write(self, region: _Region, node: fx.Node, carried: list[fx.Node], writes: frozenset[int]) -> bool:
        """Whether what a node writes is a value of the chain that nobody reads after it but by its result."""
        here = self._order[node]
        for memory in writes:
            if memory not in {storage_of(_value(n)) for n in carried}:
                return False
            for other in self._sharing.get(memory, ()):
                if self._order[other] < here and other not in region.members:
                    return False
                if self._order[other] < here and any(self._order[user] > here for user in other.users):
                    return False
        return True

    # --- where the chain ends ---

    def _is_result(self, product: Product, tail: fx.Node) -> bool:
        value = _value(tail)
        return value.dtype == product.value.dtype and is_contiguous(value)

    def _made(self, region: _Region, nodes: tuple[fx.Node, ...]) -> Chain:
        formula, operands = _formula_of(region, nodes)
        views = tuple(_views_to(region, nodes[-1]))
        product = region.product
        for kind, (_, most) in FIRST_SLOT.items():
            count = formula.kinds.count(kind)
            if count > most:
                raise Refused(f"{_label(nodes[-1])}: {count} operands of kind {kind}, an epilogue has at most {most}")
        is_alone = len(nodes) == 1 and (product.bias is None or formula.kinds == (PER_COLUMN,))
        if is_alone or _is_norm_alone(product, formula, operands):
            return Chain(product, nodes, views, operands, formula, None)
        made = epilogue_of(formula)
        if isinstance(made, str):
            raise Refused(f"{_label(nodes[-1])}: {made}")
        return Chain(product, nodes, views, operands, formula, made)


def _value(node: fx.Node) -> Tensor:
    value = tensor_of(node)
    assert value is not None
    return value


def _label(node: fx.Node) -> str:
    return node.name


def _is_view(value: Tensor, of: fx.Node) -> bool:
    """Whether a node gives the same elements, perhaps in another shape."""
    origin = _value(of)
    return is_same_memory(value, origin)


def _needed(region: _Region, tail: fx.Node) -> tuple[fx.Node, ...] | None:
    """The members that a node is computed of, itself included; None where others read them, too."""
    found: set[fx.Node] = set()
    waiting = [tail]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [n for n in node.all_input_nodes if n in region.members]
    if any(user not in found for node in found if node is not tail for user in node.users):
        return None
    return tuple(node for node in region.members if node in found)


def _first_reader_outside(region: _Region) -> str:
    readers = (user for node in region.members for user in node.users if user not in region.members)
    return _label(next(readers, region.product.node))


def _views_to(region: _Region, tail: fx.Node) -> Iterator[fx.Node]:
    """The views between the product and a node that has their shape."""
    if same_sizes(_value(tail).shape, region.product.value.shape):
        return
    node, found = tail, []
    while node is not region.product.node:
        if node in region.views:
            found.append(node)
        node = next(n for n in node.all_input_nodes if n in region.members)
    yield from reversed(found)


# --- operands --------------------------------------------------------------------------------------------------------


def _formula_of(
    region: _Region, nodes: tuple[fx.Node, ...], *, alone: bool = False
) -> tuple[Formula, tuple[Operand | Norm, ...]]:
    """The formula of some members, in order.

    Args:
        region: has them.
        nodes: the product first; or, with `alone`, one node whose members each are an accumulator to it.
        alone: whether to ask about one node.
    """
    maker = _Maker(region, alone)
    for node in nodes:
        maker.add(node)
    return maker.formula(), tuple(maker.operands)


class _Maker:
    """Collects steps and operands; numbers are given out at the end, operands before steps."""

    def __init__(self, region: _Region, alone: bool) -> None:
        self._region, self._alone = region, alone
        self.operands: list[Operand | Norm] = []
        self._kinds: list[str] = []
        self._steps: list[Step] = []
        self._values: dict[fx.Node, Any] = {}  # of members: ("operand" or "step", number), or None: the product
        self._read: dict[tuple[fx.Node, str], int] = {}

    def formula(self) -> Formula:
        """What was collected."""
        first = 1 + len(self._kinds)

        def numbered(part: Any) -> Any:
            if isinstance(part, _Of):
                return Slot(0 if part.what == "product" else part.number + (1 if part.what == "operand" else first))
            if isinstance(part, (tuple, list)) and not isinstance(part, torch.Size):
                return type(part)(numbered(each) for each in part)
            return part

        steps = [
            Step(step.target, numbered(step.args), numbered(step.kwargs), step.dtype, step.line)
            for step in self._steps
        ]
        return Formula(tuple(self._kinds), tuple(steps))

    def add(self, node: fx.Node) -> None:
        """Take one member along."""
        product = self._region.product
        if node is product.node:
            value = _Of("product", 0)
            if product.bias is not None:
                bias = self._operand(product.bias, product.value, product.value)
                value = self._step(Step(torch.add, (value, bias), line=_line(node)))
            self._values[node] = value
        elif node in self._region.views:
            self._values[node] = self._member(next(n for n in node.all_input_nodes if n in self._region.members))
        elif node.target is F.batch_norm:
            self._norm(node)
        else:
            value = _value(node)
            shape = _value(next(n for n in node.all_input_nodes if n in self._region.members))
            # Where PyTorch's types overflow is left to PyTorch.
            most = min(_LARGEST, torch.finfo(product.value.dtype).max)
            args = _substituted(node.args, lambda n: self._argument(n, shape), most)
            kwargs = tuple(
                (key, _substituted(part, lambda n: self._argument(n, shape), most)) for key, part in node.kwargs.items()
            )
            # Where PyTorch computes in the product's type or in fp32, an epilogue computes in fp32.
            wide = not value.is_floating_point() or value.dtype in (product.value.dtype, torch.float32)
            step = Step(node.target, args, kwargs, None if wide else value.dtype, _line(node))
            self._values[node] = self._step(step)

    def _member(self, node: fx.Node) -> _Of:
        return _Of("product", 0) if self._alone else self._values[node]

    def _argument(self, node: fx.Node, shape: Tensor) -> _Of:
        if node in self._region.members:
            return self._member(node)
        return self._operand(node, shape, self._region.product.value)

    def _operand(self, node: fx.Node, beside: Tensor, product: Tensor) -> _Of:
        value = tensor_of(node)
        if value is None:
            raise Refused(f"{_label(node)} is a size or another number that changes from call to call")
        kind = kind_of(value, beside, product)
        if not kind:
            shape = [int(size) if isinstance(size, int) else str(size) for size in value.shape]
            raise Refused(f"{_label(node)}, {str(value.dtype).removeprefix('torch.')} {shape}, is no operand")
        if (node, kind) not in self._read:
            self._read[node, kind] = self._new(Operand(kind, node), kind)
        return _Of("operand", self._read[node, kind])

    def _new(self, operand: Operand | Norm, *kinds: str) -> int:
        self.operands.append(operand)
        self._kinds += kinds
        return len(self._kinds) - len(kinds)

    def _step(self, step: Step) -> _Of:
        self._steps.append(step)
        return _Of("step", len(self._steps) - 1)

    def _norm(self, node: fx.Node) -> None:
        """multiplier * z + offset."""
        origin, norm = _norm_of(node, self._region)
        first = self._new(norm, PER_COLUMN, PER_COLUMN)
        scaled = self._step(Step(torch.mul, (_Of("operand", first), self._member(origin)), line=_line(node)))
        self._values[node] = self._step(Step(torch.add, (scaled, _Of("operand", first + 1)), line=_line(node)))


@dataclass(frozen=True)
class _Of:
    what: str
    number: int


def _substituted(part: Any, of_node: Callable[[fx.Node], _Of], most: float) -> Any:
    """An argument with its nodes replaced; `most`: the largest number."""
    if isinstance(part, fx.Node):
        return of_node(part)
    if isinstance(part, complex) or (isinstance(part, (int, float)) and not abs(part) <= most):
        raise Refused(f"{part!r:.12} is beyond what the product's type holds")
    if isinstance(part, slice):
        raise Refused("an index takes elements out")
    if isinstance(part, (tuple, list)) and not isinstance(part, torch.Size):
        return tuple(_substituted(each, of_node, most) for each in part)
    return part


def _line(node: fx.Node) -> str:
    """`file:line` of the model's code."""
    text = node.stack_trace or ""
    places = [line for line in text.splitlines() if line.strip().startswith('File "')]
    if not places:
        return ""
    file, _, rest = places[-1].strip().removeprefix('File "').partition('", line ')
    return f"{file}:{rest.partition(',')[0]}"


def kind_of(value: Tensor, beside: Tensor, product: Tensor) -> str:
    """What an operand is to an epilogue; empty where it can be none.

    Args:
        value: the operand.
        beside: what the chain has at that place.
        product: the product.
    """
    if value.device != product.device or not value.is_floating_point():
        return ""
    wide = product.dtype == torch.float32
    if value.dim() == 0:
        # PyTorch may round a 0-d tensor of another type to 16 bits first, or take it as a number.
        return SCALAR if wide or value.dtype == product.dtype else ""
    if value.dtype not in (product.dtype, torch.float32):
        return ""
    shape, result = value.shape, beside.shape
    if len(shape) > len(result):
        return ""
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
    return MATRIX if same_sizes(shape, result) else ""


# --- BatchNorm -------------------------------------------------------------------------------------------------------


def _norm_of(node: fx.Node, region: _Region) -> tuple[fx.Node, Norm]:
    bound = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    origin, eps = given["input"], given["eps"]
    if given["training"] is not False or given["running_mean"] is None or given["running_var"] is None:
        raise Refused(f"{_label(node)} needs the batch's statistics")
    product, value = region.product.value, _value(node)
    if origin not in region.members or value.dim() != 2 or not same_sizes(value.shape, product.shape):
        raise Refused(f"{_label(node)} is a BatchNorm of an input that is not [M, N]")
    if not isinstance(eps, float) or not 0 <= eps < math.inf:
        raise Refused(f"{_label(node)} has an eps that is no finite number, or negative")
    vectors = [given[name] for name in _NORM]
    found = [tensor_of(vector) for vector in vectors if vector is not None]
    if any(each is None or kind_of(each, value, product) != PER_COLUMN or each.dim() != 1 for each in found):
        raise Refused(f"{_label(node)}: a vector of BatchNorm is not of the product's width, dtype or device")
    x = tensor_of(region.product.x)
    dtypes = {each.dtype for each in found if each is not None}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, None if x is None else x.dtype}:
        raise Refused(f"{_label(node)}: the vectors of BatchNorm are of other types")
    return origin, Norm(tuple(vectors), eps)


def _is_norm_alone(product: Product, formula: Formula, operands: tuple[Operand | Norm, ...]) -> bool:
    """Whether the chain is the product, its bias and one BatchNorm: a function of epigemm's own."""
    before = 0 if product.bias is None else 1
    norms = sum(isinstance(each, Norm) for each in operands)
    return norms == 1 and len(operands) == 1 + before and len(formula.steps) == 2 + before
