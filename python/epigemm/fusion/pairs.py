"""Gated layers: a product whose halves of columns are multiplied with each other is replaced by two products.

In `a, b = fc(x).chunk(2, -1); act(a) * b` the chain of the product ends at `chunk`, because no kernel in use multiplies
the halves of its own result. Two products, of views of the weight, have chains of their own, and one chain reads the
result of the other. This saves a pass over memory. But two products of N columns may take longer than one of 2N. So
such products are replaced in a copy of the graph first, and then those alone for which the planner expects a gain
(`pays`).

A product is not replaced if something else reads it, or if autograd records it (the gradient of x would take two
products and a sum). Nor within an `inference_mode` that the model enters, where AOTAutograd cannot trace views of
parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import grad_mode

from epigemm.fusion import matmuls, profit
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of, run_again
from epigemm.fusion.layers import Inserter
from epigemm.fusion.matmuls import Product
from epigemm.fusion.profit import Judged
from epigemm.fusion.values import (
    is_same_memory,
    known,
    same_sizes,
    storage_of,
    tensor_of,
    tensors_of,
    value_at,
    value_of,
)

# The share of the time of one product and its kernels: a smaller gain is within the error of these estimates.
_WORTH = 0.97


@dataclass
class Pair:
    """Two products in place of one.

    Attributes:
        first: the product with the first half of the columns.
        second: the product with the second half.
        one_us: the device's time for the one product; 0 on a CPU.
        glu: for `F.glu`: the nodes of the product and the sigmoid that replace it; else empty.
        glu_us: the device's time for `F.glu`.
    """

    first: fx.Node
    second: fx.Node
    one_us: float
    glu: Sequence[fx.Node] = ()
    glu_us: float = 0.0

    @property
    def products(self) -> tuple[fx.Node, fx.Node]:
        """Both."""
        return self.first, self.second

    def chains(self, judged: Mapping[Chain, Judged]) -> list[Chain]:
        """The chains of both products."""
        return [chain for chain in judged if chain.product.node in self.products]


class _Halves(NamedTuple):
    """The nodes that read a product by halves, in the graph's order."""

    views: dict[fx.Node, int | None]  # the views in between; the last ones with the half that each of them is
    glus: list[fx.Node]  # calls of `F.glu`


def times(judged: Mapping[Chain, Judged]) -> dict[str, float]:
    """The device's times for products with what follows them, by the names of the products."""
    return {
        chain.product.node.name: each.fallback_us if each.why_not else each.fused_us
        for chain, each in judged.items()
    }


def take_apart(graph: fx.Graph, only: Collection[str], us: Mapping[str, float]) -> dict[str, Pair]:
    """Replace products of these names that are only read by halves by two each; `us`: the times for the one product."""
    found, depth = dict[str, Pair](), 0
    for node in list(graph.nodes):
        depth += node.target is grad_mode._enter_inference_mode
        depth -= node.target is grad_mode._exit_inference_mode
        product = None if depth or node.name not in us or node.name not in only else matmuls.understand(node)
        if not isinstance(product, Product) or not _may_be_two(product):
            continue
        halves = _Halves({}, [])
        if _reads_by_halves(product, node, halves) and not _is_written(product):
            found[node.name] = _made_two(product, halves, us[node.name])
    return found


# --- whether it pays -------------------------------------------------------------------------------------------------


def pays(pair: Pair, judged: Mapping[Chain, Judged], *, one_by_one: bool) -> bool:
    """Whether a pair is faster, and a fused chain of one product reads the other's result."""
    return _is_multiplied(pair, judged) and _is_faster(pair, judged, one_by_one)


def _is_multiplied(pair: Pair, judged: Mapping[Chain, Judged]) -> bool:
    """Whether a fused chain of one product reads the other's result, and nothing outside of both reads them."""
    chains = pair.chains(judged)
    if len(chains) != 2:
        return False
    nodes = {node for chain in chains for node in chain.nodes}
    if any(user not in nodes for product in pair.products for user in product.users):
        return False
    return any(
        other.nodes[-1] in one.sources and not judged[one].why_not
        for one, other in (chains, reversed(chains))
    )


def _is_faster(pair: Pair, judged: Mapping[Chain, Judged], one_by_one: bool) -> bool:
    if not pair.one_us:
        return True  # on a CPU all chains are fused
    chains, us = pair.chains(judged), 0.0
    for chain in chains:
        found = judged[chain]
        plain_us = profit.plain_us(found, profit.kernels_behind(chain))
        # The first of two joined chains has the time of both, which its own operators do not stand for.
        fused_us = found.fused_us if found.both else min(plain_us, found.fused_us)
        us += plain_us if found.why_not else fused_us
    return us < _WORTH * _us_of_one(pair, chains, one_by_one)


def _us_of_one(pair: Pair, chains: list[Chain], one_by_one: bool) -> float:
    """The device's time for the one product and the kernels behind it."""
    behind = [node for chain in chains for node in profit.kernels_behind(chain)]
    if one_by_one:
        own = [node for node in behind if node not in pair.glu]
        return pair.one_us + pair.glu_us + sum(map(profit.device_us, own))
    inner = {node for chain in chains for node in chain.nodes}
    matrices = [value_at(each) for chain in chains for each in chain.matrices if each not in inner]
    halves = [value_at(product) for product in pair.products]
    return pair.one_us + profit.moved_us([*halves, *matrices, halves[0]])


# --- the graph -------------------------------------------------------------------------------------------------------


def _may_be_two(product: Product) -> bool:
    value = product.value
    if (
        (product.is_kn and product.ends is None)
        or product.is_batch
        or product.is_scaled
        or value.requires_grad
    ):
        return False
    read = [tensor_of(each) for each in (product.x, product.weight, product.bias) if each is not None]
    columns = value.shape[-1]
    if not isinstance(columns, int) or columns < 2 or columns % 2 or not product.adds_columns:
        return False
    if not all(isinstance(each, FakeTensor) for each in read):
        return False
    # Under autocast x would be cast twice.
    return all(each is not None and each.dtype == value.dtype for each in read[:2])


def _reads_by_halves(product: Product, node: fx.Node, found: _Halves) -> bool:
    """Whether everything that reads a node, which has all elements of a product, reads halves of its columns.

    `found` gets these readers.
    """
    for user in node.users:
        effects = effects_of(user)
        if user.op == "output" or not effects.known or effects.writes:
            return False
        if user.target is F.glu:
            gated, whole = tensor_of(user), product.value.shape
            if gated is None or not same_sizes(gated.shape, (*whole[:-1], int(whole[-1]) // 2)):
                return False  # of another axis
            found.glus.append(user)
            continue
        value, parts = value_of(user), tensors_of(user)
        if not effects.is_view or not parts:
            return False
        if isinstance(value, (tuple, list)):
            found.views[user] = None
            for each in user.users:
                half = _half(value_of(each), product) if each.target is operator.getitem else None
                if half is None:
                    return False
                found.views[each] = half
            continue
        half = _half(value, product)
        found.views[user] = half
        if half is None and not (
            is_same_memory(value, product.value) and _reads_by_halves(product, user, found)
        ):
            return False
    halves = {half for half in found.views.values() if half is not None}
    return len(halves) == 2 if not found.glus else not found.views and len(found.glus) == 1


def _is_written(product: Product) -> bool:
    """Whether something may write to the product's memory, which the two products would not share."""
    memory = storage_of(product.value)
    for node in product.node.graph.nodes:
        effects = effects_of(node)
        read = (storage_of(value) for each in node.all_input_nodes for value in tensors_of(each))
        if memory in effects.writes or (not effects.known and memory in read):
            return True
    return False


def _half(value: Any, product: Product) -> int | None:
    """Which half of a product's columns a view is; None if it is neither."""
    whole = product.value
    if not isinstance(value, Tensor) or storage_of(value) != storage_of(whole) or value.dtype != whole.dtype:
        return None
    columns = int(whole.shape[-1]) // 2
    if not same_sizes(value.shape, (*whole.shape[:-1], columns)):
        return None
    lies = zip(value.shape, value.stride(), whole.stride(), strict=True)
    if not all(known(size == 1) or known(one == other) for size, one, other in lies):
        return None
    offset = value.storage_offset() - whole.storage_offset()
    return next((half for half in (0, 1) if known(offset == half * columns)), None)


def _made_two(product: Product, halves: _Halves, us: float) -> Pair:
    node, whole = product.node, product.value
    graph, inserter = node.graph, Inserter(node)
    of_groups, last = product.ends is not None, product.ends or product.bias
    make_two = _two_of_groups if of_groups else _two
    first, second = inserter.run(make_two, (product.x, product.weight, last), learns=False)
    pair = Pair(first, second, us)
    made = list(inserter.made)
    for each in halves.glus:
        inserter = Inserter(each)
        (result,) = inserter.run(_glu, pair.products, learns=False)
        pair.glu, pair.glu_us = inserter.made, profit.device_us(each)
        made += inserter.made
        each.replace_all_uses_with(result)
    for view, half in halves.views.items():
        if half is not None:
            view.replace_all_uses_with(pair.products[half])
    gone = {node, *halves.views, *halves.glus}
    for each in [each for each in reversed(graph.nodes) if each in gone]:
        graph.erase_node(each)
    for each in graph.nodes:
        if each not in made and storage_of(whole) in map(storage_of, tensors_of(each)):
            each.meta["example_value"], _ = run_again(each, value_of)
    return pair


def _two(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    weights, biases = torch.chunk(weight, 2), (None, None) if bias is None else torch.chunk(bias, 2)
    return tuple(F.linear(x, *each) for each in zip(weights, biases, strict=True))


def _two_of_groups(x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch._grouped_mm(x, half, offs=ends) for half in torch.chunk(weight, 2, -1))


def _glu(first: Tensor, second: Tensor) -> Tensor:
    return torch.mul(first, torch.sigmoid(second))
