"""Chains: a product and what follows it, as far as one epilogue can compute it, and what that reads beside the product.

A chain begins with the product. Only its last node is read by other nodes. Between the two, nothing is written except
the chain's own values, and no mode (gradients, autocast) changes. So the fused call may take the place of the last
node, where everything that the chain reads has been computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import fx

from epigemm.arguments.calls import EIGHT_BITS
from epigemm.decorator import UserEpilogue
from epigemm.epilogues.kinds import MATRIX, PER_COLUMN, too_many
from epigemm.fusion import matmuls
from epigemm.fusion.effects import effects_of
from epigemm.fusion.formula import ChainFormula, epilogue_of, name_of
from epigemm.fusion.matmuls import Product, Scales
from epigemm.fusion.operands import ChainOperand, Refused, Region, formula_of, is_norm_alone
from epigemm.fusion.quantisation import quantisation_of
from epigemm.fusion.values import (
    is_contiguous,
    is_same_memory,
    known,
    same_layout,
    same_sizes,
    storage_of,
    tensor_of,
    tensors_of,
    value_at,
)

# Reasons that are given only if there is no other: most results are read by other products.
_TAKEN = "is a part of another product's chain"
_PRODUCT = "is another product"
_IN_8_BITS = "reads a result in 8 bits"
_NO_ENDS = (_TAKEN, _PRODUCT, _IN_8_BITS)


@dataclass(frozen=True)
class Chain:
    """A product and what follows it.

    Attributes:
        product: the product.
        nodes: the nodes that the call replaces, the product first, the node with the result last.
        views: the views among them that give the result its shape, in order.
        operands: what the epilogue reads; a BatchNorm is two vectors.
        formula: of the product and the operands.
        epilogue: the epilogue of the formula; None if only its bias, or one BatchNorm, follows the product.
        ended: why the chain ends where it does; empty if nothing follows.
        computes: whether the call computes something pointwise other than the product's bias.
        is_followed: whether something pointwise follows the product, in the chain or not.
        splits_rows: whether matrices that share rows are read beside a view of the product with other leading axes.
        out_scale: of a result that is quantised to 8 bits: by which it is divided.
    """

    product: Product
    nodes: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    operands: tuple[ChainOperand, ...]
    formula: ChainFormula
    epilogue: UserEpilogue | None
    ended: str = ""
    computes: bool = False
    is_followed: bool = False
    splits_rows: bool = False
    out_scale: fx.Node | float | None = None

    @property
    def norm(self) -> ChainOperand | None:
        """The first BatchNorm that is folded."""
        return next((operand for operand in self.operands if operand.eps is not None), None)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The arguments of its call: x, the weight, the ends of groups, the nodes of which the operands are made."""
        given = [source for operand in self.operands for source in operand.sources if source is not None]
        scales = () if self.product.scales is None else self.scales(self.product.scales)
        ends = () if self.product.ends is None else (self.product.ends,)
        return self.product.x, self.product.weight, *scales, *ends, *given

    def scales(self, given: Scales) -> tuple[fx.Node, ...]:
        """Those of a product of 8-bit numbers, and of its result if that is divided by a tensor."""
        of_result = (self.out_scale,) if isinstance(self.out_scale, fx.Node) else ()
        return given.x, given.weight, *of_result

    @property
    def dtype(self) -> torch.dtype:
        """That of its result."""
        return value_at(self.nodes[-1]).dtype

    @property
    def matrices(self) -> list[fx.Node]:
        """The operands of the product's shape."""
        matrices = (each for each in self.operands if each.kind == MATRIX)
        return [source for each in matrices for source in each.sources if source is not None]

    @property
    def function(self) -> str:
        """The name of what it computes."""
        linear = "linear" if self.product.ends is None else "grouped_linear"
        if self.epilogue is None:
            return "linear_batch_norm" if self.norm else linear
        own = 0 if self.product.bias is None or self.product.is_scaled else 1  # a bias has no name
        return f"{linear}_{name_of(*self.formula.steps[own:])}"


class ChainFinder:
    """Finds the chains of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._effects = cache(effects_of)
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for memory in {storage_of(value) for value in tensors_of(node)}:
                self._sharing.setdefault(memory, []).append(node)
        self._taken: set[fx.Node] = set()
        self._transformed = _transformed(graph)
        # If shapes change in place, the shapes that Dynamo noted are later ones.
        self._changes_shapes = any(
            self._effects(node).changes_shapes
            for node in graph.nodes
            if node.op == "call_method" and str(node.target).endswith("_")
        )

    def why_not(self, node: fx.Node, product: Product | str) -> str:
        """Why a product is not fused because of the graph around it; empty if it may be."""
        if node in self._transformed:
            return "it is inside of a transform of torch.func, or of forward-mode derivatives"
        if isinstance(product, str):
            return ""
        if product.value.requires_grad and self.is_written_after(node, (product.bias,)):
            return "what it adds is written before its derivative would read it again"
        try:
            formula_of(Region(product, {node: None}), (node,))
        except Refused as refusal:
            return f"its summand {refusal}"
        return "a tensor gets another shape in place" if self._changes_shapes else ""

    def chain(self, product: Product) -> Chain:
        """The longest chain that begins with a product and has no node of another chain."""
        region = self._grow(product)
        ended, types = "", {product.value.dtype}
        if product.scales is not None and types == {torch.float32}:
            types = {*matmuls.DTYPES}  # of which its call gives any
        for tail in reversed([node for node in region.members if node not in region.views]):
            nodes = _needed(region, tail)
            if nodes is None:
                readers = (user for node in region.members for user in node.users)
                outside = next((user for user in readers if user not in region.members), product.node)
                ended = ended or f"{outside} reads a value in between"
                continue
            quantised = region.quantised.get(tail)
            if value_at(tail).dtype not in (types if quantised is None else {EIGHT_BITS[0]}):
                continue
            own = nodes if quantised is None else tuple(each for each in nodes if each not in quantised.nodes)
            try:
                made = self._made(region, own)
            except Refused as refusal:
                ended = str(refusal)
                continue
            if quantised is not None:
                made = replace(made, nodes=nodes, out_scale=quantised.scale)
            self._taken.update(made.nodes)
            computes = quantised is not None or not region.arithmetic.isdisjoint(made.nodes)
            is_followed = computes or self._is_followed(product.node)
            reasons = dict.fromkeys(region.refused.values())
            ended = "; ".join(each for each in reasons if not each.endswith(_NO_ENDS)) or ended
            if is_followed and not computes:
                ended = ended or "; ".join(reasons) or "what follows is of another type"
            return replace(made, ended=ended, computes=computes, is_followed=is_followed)
        raise AssertionError("a product alone is a chain")

    def _is_followed(self, node: fx.Node, *, is_read_once: bool = False) -> bool:
        """Whether something pointwise reads a node or a view of all of it; reordered axes: as the only reader."""
        if is_read_once and len(node.users) > 1:
            return False
        for user in node.users:
            value, effects = tensor_of(user), self._effects(user)
            if value is None or not known(value.numel() == value_at(node).numel()):
                continue
            if effects.is_pointwise:
                return True
            if effects.is_view and not effects.writes:
                in_order = is_contiguous(value)
                if self._is_followed(user, is_read_once=is_read_once or not in_order):
                    return True
        return False

    # --- what may follow ---

    def _grow(self, product: Product) -> Region:
        region = Region(product)
        region.members[product.node] = None
        waiting = set(product.node.users)
        node = product.node.next
        while waiting and node.op != "output":
            effects = self._effects(node)
            if node in waiting:
                waiting.discard(node)
                reason = self._why_not(region, node)
                if not reason:
                    region.members[node] = None
                    waiting.update(node.users)
                else:
                    region.refused[node] = reason
            if node not in region.members and (effects.writes or not effects.known):
                what = "writes to memory" if effects.writes else "may change a mode or write to memory"
                region.refused.setdefault(node, f"{node} {what}")
                break
            node = node.next
        return region

    def _why_not(self, region: Region, node: fx.Node) -> str:
        """Why a node that reads members is not part of the chain; empty if it is."""
        if node in self._taken:
            return f"{node} {_PRODUCT if matmuls.understand(node) else _TAKEN}"
        value, effects = tensor_of(node), self._effects(node)
        if value is None or not effects.known:
            return f"{node} is not known to be pointwise"
        carried = region.carried(node)
        if node not in region.quantised and not region.quantised.keys().isdisjoint(carried):
            return f"{node} {_IN_8_BITS}"
        learns = any(value_at(n).requires_grad for n in carried)  # comparisons do not
        if value.is_floating_point() and learns and not value.requires_grad:
            return f"{node} ends a derivative"
        if region.product.scales is not None and value.requires_grad:
            return f"{node} has a gradient, which products of 8 bits do not have"
        if effects.writes and not self._may_write(region, node, carried, effects.writes):
            return f"{node} writes to memory that others read"
        # An operator such as view_as reads only the shape of its other argument.
        is_view = len(carried) == 1 or (effects.is_view and carried[0] is node.args[0])
        if is_view and not effects.writes and is_same_memory(value, value_at(carried[0])):
            region.views.add(node)
            return ""
        if not all(same_layout(value, value_at(n)) for n in carried):
            if effects.is_pointwise or not known(value.numel() < value_at(carried[0]).numel()):
                return f"{node} gives a result of another shape or order"
            if effects.is_view:
                return f"{node} takes a part of it, which is not pointwise"
            return f"{node} makes one number of several, as norms do, which is not pointwise"
        if effects.is_view and value.dtype == value_at(carried[0]).dtype:
            read = {storage_of(each) for n in node.all_input_nodes for each in tensors_of(n)}
            if effects.returns == read == {storage_of(value_at(carried[0]))}:
                region.idle.add(node)
                return ""
        if node in region.quantised:
            return ""
        if region.product.scales is not None and (found := quantisation_of(node, region)) is not None:
            region.quantised.update(dict.fromkeys(found.nodes, found))
            return ""
        if value.dtype in EIGHT_BITS:
            return "what follows is rounded to 8 bits"
        try:
            formula, operands, _ = formula_of(region, (node,), alone=True)
        except Refused as refusal:
            return str(refusal)
        if region.product.value.requires_grad and any(
            self.is_written_after(node, each.sources) for each in operands
        ):
            return f"{node} reads what is written before its derivative would read it again"
        made = epilogue_of(formula)
        if isinstance(made, str):
            return f"{node}: {made}"
        if made.traced.program.steps:
            region.arithmetic.add(node)
        return ""

    def _may_write(
        self, region: Region, node: fx.Node, carried: list[fx.Node], writes: frozenset[int]
    ) -> bool:
        """Whether what a node writes is read later only through the node's result."""
        here = self._order[node]
        for memory in writes:
            if memory not in {storage_of(value_at(n)) for n in carried}:
                if self._is_own(node, memory):
                    continue
                return False
            for other in self._sharing.get(memory, ()):
                if self._order[other] < here and other not in region.members:
                    return False
                if self._order[other] < here and any(self._order[user] > here for user in other.users):
                    return False
        return True

    def _is_own(self, node: fx.Node, memory: int) -> bool:
        """Whether a node adds in place to a tensor that the graph has made, and that no other node uses later."""
        here = self._order[node]
        for other in self._sharing.get(memory, ()):
            if self._order[other] >= here:
                continue
            readers = [user for user in other.users if user is not node]
            if other.op in ("placeholder", "get_attr") or any(self._order[user] > here for user in readers):
                return False
            # An alias of the memory, which Dynamo has not noted, may be read later.
            for each in (other, *readers):
                returns = self._effects(each).returns - {storage_of(value) for value in tensors_of(each)}
                if returns or not self._effects(each).known:
                    return False
        return storage_of(value_at(node)) == memory and "out" not in node.kwargs

    def is_written_after(self, node: fx.Node, sources: Iterable[fx.Node | None]) -> bool:
        """Whether the graph writes an operand later, which a fused call saves for the backward pass."""
        for memory in {storage_of(value_at(source)) for source in sources if source is not None}:
            for user in {user for other in self._sharing[memory] for user in other.users}:
                if self._order[user] > self._order[node] and memory in self._effects(user).writes:
                    return True
        return False

    # --- where the chain ends ---

    def _made(self, region: Region, nodes: tuple[fx.Node, ...]) -> Chain:
        formula, operands, lead = formula_of(region, nodes)
        product, views = region.product, _views_to(region, nodes[-1])
        if found := too_many(formula.kinds):
            kind, count, most = found
            raise Refused(f"{nodes[-1]}: {count} operands of kind {kind}, an epilogue has at most {most}")
        kinds = () if product.bias is None else (PER_COLUMN,)
        is_alone = len(formula.steps) == len(kinds) and formula.kinds == kinds
        if is_alone or is_norm_alone(product, formula, operands):
            return Chain(product, nodes, views, operands, formula, None)
        made = epilogue_of(formula)
        if isinstance(made, str):
            raise Refused(f"{nodes[-1]}: {made}")
        splits_rows = lead is not None and not same_sizes(lead, product.value.shape[:-1])
        return Chain(product, nodes, views, operands, formula, made, splits_rows=splits_rows)


def _transformed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes between begin and end of a transform such as `torch.vmap`, even if their values look plain."""
    found, depth = set(), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting") or name == "_enter_dual_level"
        depth -= name.endswith("_decrement_nesting") or name == "_exit_dual_level"
        if depth:
            found.add(node)
    return found


def _needed(region: Region, tail: fx.Node) -> tuple[fx.Node, ...] | None:
    """The node and the members from which it is computed; None if other nodes also read these."""
    found: set[fx.Node] = set()
    waiting = [tail]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += region.carried(node)
    if any(user not in found for node in found if node is not tail for user in node.users):
        return None
    return tuple(node for node in region.members if node in found)


def _views_to(region: Region, tail: fx.Node) -> tuple[fx.Node, ...]:
    """The views between the product and a node that has their shape."""
    node, found = tail, []
    if same_layout(value_at(tail), region.product.value):
        node = region.product.node
    while node is not region.product.node:
        if node in region.views:
            if len(region.carried(node)) > 1:
                raise Refused(f"{node} takes its shape from a value inside the chain")
            found.append(node)
        node = region.carried(node)[0]
    return tuple(reversed(found))
