"""Copies an operand with reordered axes once, so that sums of products with it are row-major.

For example, the patches of an image are a view of a convolution's result with reordered axes. A sum has the layout of
its first operand. So in eager mode every residual sum of some models has the layout of the patches, and cannot be fused
with a product, whose result is row-major. One copy before the first sum makes all of them row-major.

A copy is kept only if it changes nothing but time. The graph's outputs must have the same layout as before. Values with
another layout must not be written, and not be read by operators that depend on memory order, such as those that draw
random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from epigemm.fusion import matmuls
from epigemm.fusion.effects import Recorder, call, effects_of
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
    """A copy in a graph, and the values whose layout it changes.

    Attributes:
        copy: the node.
        before: the earlier fake tensors of the nodes whose layout has changed.
        back: for results of the graph whose layout has changed the nodes that copy them to the earlier one.
    """

    copy: fx.Node
    before: dict[fx.Node, Any] = field(default_factory=dict)
    back: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @property
    def gain(self) -> int:
        """The number of sums that have to be fused: a copy reads and writes once, and each fused sum saves as much."""
        return 2 + len(self.back)

    def undo(self) -> None:
        """Restore the graph."""
        for result, nodes in self.back.items():
            nodes[-1].replace_all_uses_with(result)
            for node in reversed(nodes):
                node.graph.erase_node(node)
        for node, value in self.before.items():
            node.meta["example_value"] = value
        origin = self.copy.args[0]
        assert isinstance(origin, fx.Node)
        self.copy.replace_all_uses_with(origin)
        self.copy.graph.erase_node(self.copy)


def put_in_rows(graph: fx.Graph) -> list[Copied]:
    """Copy operands that prevent at least two sums with products from being row-major."""
    found: list[Copied] = []
    tries = 0
    for node in list(graph.nodes):
        other = _lies_as(node)
        if other is not None and tries < _TRIES:
            tries += 1
            copied = _copied(node, other)
            if copied is not None:
                found.append(copied)
    return found


def pay(copies: Iterable[Copied], taken: Iterable[fx.Node]) -> bool:
    """For each copy, whether fused calls replace enough of the sums that it makes row-major."""
    nodes = set(taken)
    return all(sum(map(_is_sum, nodes.intersection(each.before))) >= each.gain for each in copies)


def _is_sum(node: fx.Node) -> bool:
    return len(_beside(node)) > 1


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


def _copied(node: fx.Node, other: fx.Node) -> Copied | None:
    """A copy of an operand for a sum; None if it would be noticed or gain nothing."""
    with node.graph.inserting_before(node):
        copied = Copied(node.graph.call_method("contiguous", (other,)))
    value = value_at(other)
    made = _again(copied.copy, None)
    assert isinstance(made, Tensor)
    copied.copy.meta = {**node.meta, "example_value": made.requires_grad_(value.requires_grad)}
    node.replace_input_with(other, copied.copy)
    try:
        gained = _propagate(copied)
    except Exception:  # the graph cannot be run, or the copy would be noticed
        gained = 0
    if gained < copied.gain:
        copied.undo()
        return None
    return copied


class _Seen(Exception):
    """The changed layout would be noticed."""


def _propagate(copied: Copied) -> int:
    """Update the fake tensors of all later nodes; returns how many more sums have operands of one layout."""
    changed, gained = {copied.copy}, 0
    node = copied.copy.next
    while node.op != "root":
        if not changed.isdisjoint(node.all_input_nodes):
            if node.op == "output":
                _give_back(copied, node, changed)
                break
            effects = effects_of(node)
            if effects.writes or not effects.known:
                raise _Seen
            old = value_of(node)
            new = _again(node, old)
            inputs = changed.intersection(node.all_input_nodes)
            values = [value for n in inputs for value in (value_of(n), copied.before.get(n))]
            memories = {storage_of(part) for part in tree_leaves(values) if isinstance(part, Tensor)}
            agreed = _agrees(node, copied.before)
            if _differs(old, new, memories):
                copied.before[node] = old
                node.meta["example_value"] = new
                changed.add(node)
            gained += _agrees(node, {}) - agreed
        node = node.next
    return gained


def _give_back(copied: Copied, output: fx.Node, changed: set[fx.Node]) -> None:
    """Copy the graph's results to the layout that they had. Their memory must be theirs alone, as a copy's is."""
    results = [n for n in output.all_input_nodes if tensor_of(n) is not None]
    was = {n: copied.before.get(n, value_of(n)) for n in results}
    memories = [storage_of(value) for value in was.values()]
    for result in changed.intersection(results):
        order = order_of(was[result])
        if order is None or memories.count(storage_of(was[result])) > 1:
            raise _Seen
        node, made = result, copied.back.setdefault(result, [])
        inverse = [order.index(axis) for axis in range(len(order))]
        steps: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("permute", order, {}),
            ("clone", (), {"memory_format": torch.contiguous_format}),
            ("permute", tuple(inverse), {}),
        ]
        for name, axes, named in steps:
            with output.graph.inserting_before(output):
                node = output.graph.call_method(name, (node, *axes), named)
            made.append(node)
            node.meta = {**result.meta}
            node.meta["example_value"] = _again(node, was[result])
        output.replace_input_with(result, node)


def _agrees(node: fx.Node, before: dict[fx.Node, Any]) -> bool:
    """Whether the operands of a sum with a product have the layout of its result."""
    value, beside = before.get(node, value_of(node)), _beside(node)
    if not _is_sum(node) or not isinstance(value, Tensor):
        return False
    is_alike = all(same_layout(before.get(n, value_at(n)), value) for n in beside)
    return is_alike and any(_is_of_a_product(n) for n in beside)


def _again(node: fx.Node, old: Any) -> Any:
    """A node's result for the present fake tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    (mode,) = {part.fake_mode for part in tree_leaves((args, kwargs)) if isinstance(part, FakeTensor)}
    recorder = Recorder()
    with mode, torch.no_grad(), recorder:
        result = call(node, args, kwargs)
    for function in (each[0] for each in recorder.calls):
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if draws or function.namespace != "aten" or "as_strided" in str(function):
            raise _Seen
    if old is None:
        return result
    parts, form = tree_flatten(result)
    known_parts = tree_leaves(old)
    made = [
        part.detach().requires_grad_(other.requires_grad) if isinstance(part, Tensor) else part
        for part, other in zip(parts, known_parts, strict=True)
    ]
    return tree_unflatten(made, form)


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
