"""Copies an operand with reordered axes once, so that sums of products with it are row-major.

For example, the patches of an image are a view of a convolution's result with reordered axes. A sum has the layout of
its first operand. So in eager mode every residual sum of some models has the layout of the patches, and cannot be fused
with a product, whose result is row-major. One copy before the first sum makes all of them row-major.

A copy is kept only if it changes nothing but time. The graph's outputs must have the same layout as before. Values with
another layout must not be written, and not be read by operators that depend on memory order, such as those that draw
random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from epigemm.fusion import matmuls
from epigemm.fusion.effects import effects_of, run_again
from epigemm.fusion.layers import Inserter
from epigemm.fusion.values import (
    is_contiguous,
    known,
    order_of,
    same_layout,
    same_sizes,
    storage_of,
    tensor_of,
    value_at,
    value_of,
)

_TRIES, _FAR = 4, 6


@dataclass
class Copied:
    """A copy in a graph, and what changes with it.

    Attributes:
        copy: the node.
        changed: it and the later nodes whose layout changes, with their new fake tensors.
        back: the graph's results among them, each with the order of the axes that it has to keep.
    """

    copy: fx.Node
    changed: dict[fx.Node, Any] = field(default_factory=dict)
    back: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    def pays(self, taken: Set[str], before: Set[str]) -> bool:
        """Whether fused calls, which replace nodes of these names now and before, replace enough more of the sums.

        A copy reads and writes once, and each fused sum saves as much.
        """
        sums = {node.name for node in self.changed if len(_beside(node)) > 1}
        return len(sums & taken) - len(sums & before) >= 2 + len(self.back)

    def value(self, node: fx.Node) -> Any:
        """A node's new value."""
        return self.changed[node] if node in self.changed else value_of(node)


def put_in_rows(graph: fx.Graph, only: Collection[str]) -> dict[str, Copied]:
    """Copy the operands that prevent sums with a product, of these names, from being row-major.

    Returns:
        The copies that change nothing but time, by the names of the first sums.
    """
    found: dict[str, Copied] = {}
    tries = 0
    for node in [node for node in graph.nodes if node.name in only]:
        other = _lies_as(node)  # of a sum behind another copy it may be row-major by now
        if other is None or tries == _TRIES:
            continue
        tries += 1
        copied = Copied(_inserted(node, Tensor.contiguous, other))
        try:
            _propagate(copied)
        except Exception:  # the graph cannot be run, or the copy would be noticed
            node.replace_input_with(copied.copy, other)
            graph.erase_node(copied.copy)
            continue
        found[node.name] = copied
        for each, value in copied.changed.items():
            each.meta["example_value"] = value
        for result, order in copied.back.items():
            _inserted(next(iter(reversed(graph.nodes))), _in_order, result, order)
    return found


def _inserted(reader: fx.Node, function: Any, origin: fx.Node, *rest: Any) -> fx.Node:
    """The result of a function of a node, which another node reads in place of it."""
    (made,) = Inserter(reader).run(function, (origin, *rest), learns=value_at(origin).requires_grad)
    reader.replace_input_with(origin, made)
    assert isinstance(made, fx.Node)
    return made


def _in_order(value: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy whose axes lie in an order."""
    inverse = [order.index(axis) for axis in range(len(order))]
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def _lies_as(node: fx.Node) -> fx.Node | None:
    """The operand, not row-major, that gives its layout to its sum with a product."""
    value = tensor_of(node)
    if value is None or is_contiguous(value) or order_of(value) is None:
        return None
    beside = [n for n in _beside(node) if is_contiguous(value_at(n))]
    others = [n for n in _beside(node) if same_layout(value_at(n), value)]
    effects = effects_of(node)
    if len(others) != 1 or not effects.is_pointwise or effects.writes:
        return None
    return others[0] if any(_is_of_a_product(n) for n in beside) else None


def _beside(node: fx.Node) -> list[fx.Node]:
    """The operands with the result's shape."""
    value, tensors = tensor_of(node), [n for n in node.all_input_nodes if tensor_of(n) is not None]
    return [] if value is None else [n for n in tensors if same_sizes(value_at(n).shape, value.shape)]


def _is_of_a_product(node: fx.Node, steps: int = _FAR) -> bool:
    if isinstance(matmuls.understand(node), matmuls.Product):
        return True
    value, tensors = value_at(node), [n for n in node.all_input_nodes if tensor_of(n) is not None]
    same = [n for n in tensors if known(value_at(n).numel() == value.numel())]
    return steps > 0 and any(_is_of_a_product(n, steps - 1) for n in same)


class _Seen(Exception):
    """The changed layout would be noticed."""


def _propagate(copied: Copied) -> None:
    """Find the values of all later nodes."""
    copied.changed[copied.copy] = value_of(copied.copy)
    node = copied.copy.next
    while node.op != "output":
        inputs = copied.changed.keys() & set(node.all_input_nodes)
        if inputs:
            effects = effects_of(node)
            if effects.writes or not effects.known:
                raise _Seen
            old = value_of(node)
            new = _again(node, copied)
            values = [value for n in inputs for value in (value_of(n), copied.value(n))]
            memories = {storage_of(part) for part in tree_leaves(values) if isinstance(part, Tensor)}
            if _differs(old, new, memories):
                copied.changed[node] = new
        node = node.next
    results = [n for n in node.all_input_nodes if tensor_of(n) is not None]
    memories_of = [storage_of(value_at(n)) for n in results]
    for result in [each for each in results if each in copied.changed]:
        # Its memory must be its own, as a copy's is.
        order = order_of(value_at(result))
        if order is None or memories_of.count(storage_of(value_at(result))) > 1:
            raise _Seen
        copied.back[result] = order


def _again(node: fx.Node, copied: Copied) -> Any:
    """A node's new value."""
    old = value_of(node)
    result, calls = run_again(node, copied.value)
    for function in (each[0] for each in calls):
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if draws or function.namespace != "aten" or "as_strided" in str(function):
            raise _Seen

    def like(part: Any, other: Any) -> Any:
        return part.detach().requires_grad_(other.requires_grad) if isinstance(part, Tensor) else part

    return tree_map(like, result, old)


def _differs(old: Any, new: Any, memories: set[int]) -> bool:
    """Whether a result has another layout than before, or shares (or shared) memory with a value that has."""
    found = False
    for one, other in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if type(one) is not type(other) or not known(one == other):
                raise _Seen
        elif one.dtype != other.dtype or not same_sizes(one.shape, other.shape):
            raise _Seen
        else:
            is_view = storage_of(other) in memories or storage_of(one) in memories
            found |= is_view or not same_layout(one, other)
    return found
