"""Two products of one x as one kernel in 16 bits, where the chain of one of them reads the other's result.

These are the gated layers of transformers: `silu(w1(x)) * w3(x)`. A call that the kernel does not take, because of its
sizes or of a mode, runs as the two calls that it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from epigemm.arguments import forms, invariance
from epigemm.arguments.calls import LinearCall
from epigemm.decorator import UserEpilogue
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR, too_many
from epigemm.epilogues.registry import Epilogue
from epigemm.fusion import profit
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import is_quiet
from epigemm.fusion.formula import composed, epilogue_of
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.site import Site
from epigemm.fusion.values import same_layout, same_sizes, tensor_of, value_at
from epigemm.linker import loader
from epigemm.operators import groups
from epigemm.planner import dry_runs, plans


class Joined(NamedTuple):
    """Two chains that one kernel computes.

    Attributes:
        first: the chain that reads the other's result: the first matrix of its epilogue.
        second: the other chain, which reads no matrix.
        epilogue: of both. The second chain's operands come first.
        place: the position of the second chain's result among the first chain's operands.
        cast: of the second chain's result to fp32, in which the first chain reads it.
    """

    first: Chain
    second: Chain
    epilogue: UserEpilogue
    place: int
    cast: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that the call replaces, in order."""
        return (*self.second.nodes, *([] if self.cast is None else [self.cast]), *self.first.nodes)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The arguments of the call: x, both weights, the ends of groups, the operands without the second product."""
        x, weight, *given = self.first.sources
        _, weight2, *others = self.second.sources
        groups = 0 if self.first.product.ends is None else 1
        ends, given, others = given[:groups], given[groups:], others[groups:]
        return (x, weight, weight2, *ends, *others, *given[: self.place], *given[self.place + 1 :])

    def call(self) -> LinearCall:
        """The call of meta tensors."""
        call, other = profit.call_of(self.first), profit.call_of(self.second)
        others = [each for each in other.operands if each is not None]
        every = [*others, *call.operands]
        linked = forms.of_types(self.epilogue.traced, call.x, every)
        every[len(others) + self.place] = None
        return call._replace(epilogue=linked, operands=every, weight2=other.weight)


def judged(graph: fx.Graph, found: Mapping[Chain, Judged], *, traced: bool) -> dict[Chain, Judged]:
    """The estimates, with those of two chains changed where one kernel is expected to be faster than two.

    `traced`: a compiler traces the graph. Of pairs, it has an operator for rows in groups alone.
    """
    result = dict(found)
    ends = {chain.nodes[-1]: chain for chain in found}
    order = {node: position for position, node in enumerate(graph.nodes)}
    for first in found:
        both = None if traced and first.product.ends is None else _both(first, ends)
        place = None if both is None else profit.place_of(first)
        if both is None or place is None or not _may_join(both, found):
            continue
        products = [chain.product for chain in (first, both.second)]
        read = [node for each in products for node in (each.node, each.ends) if node is not None]
        if not is_quiet(min(read, key=order.__getitem__), first.nodes[-1]):
            continue
        call = both.call()
        dry = dry_runs.dry_run(call, 0, place, tried=True)
        if dry.fused and not loader.would_link(call.epilogue, ",".join(dry.missing), place.device):
            us = plans.fused_us(dry.tried[0].plan)
            one, other = found[first], found[both.second]
            result[first] = one._replace(why_not="", way=Way.FUSED, fused_us=us, both=both)
            result[both.second] = other._replace(why_not="", way=Way.FUSED, fused_us=0.0, both=both)
    return result


def _both(first: Chain, ends: Mapping[fx.Node, Chain]) -> Joined | None:
    """The pair of a chain and of the product that it reads first, if their forms fit."""
    place = next((i for i, each in enumerate(first.operands) if each.kind == MATRIX), None)
    if place is None or first.norm is not None or first.operands[place].order is not None:
        return None
    source, epilogue = first.matrices[0], first.epilogue
    cast = source if source not in ends and _is_cast(source) else None
    second = ends.get(source if cast is None else cast.all_input_nodes[0])
    if second is None or second is first or epilogue is None:
        return None
    if any(user not in first.nodes for user in source.users):
        return None
    others = second.formula.kinds
    if (
        second.norm is not None
        or second.views
        or MATRIX in others
        or SCALAR in (*others, *first.formula.kinds)
    ):
        return None
    if others or second.formula.steps:
        formula = composed(first.formula, place, second.formula)
        made = epilogue_of(formula)
        if too_many(formula.kinds) or not isinstance(made, UserEpilogue):
            return None
        epilogue = made
    return Joined(first, second, epilogue, place, cast)


def _is_cast(node: fx.Node) -> bool:
    """Whether a node is the cast of 16 bits to fp32 that alone reads them."""
    if node.target not in ("to", "float") or len(node.all_input_nodes) != 1:
        return False
    value, cast = tensor_of(node.all_input_nodes[0]), value_at(node)
    if value is None or value.element_size() != 2 or len(node.all_input_nodes[0].users) != 1:
        return False
    return cast.dtype is torch.float32 and same_layout(value, cast)


def _may_join(both: Joined, found: Mapping[Chain, Judged]) -> bool:
    chains = (both.first, both.second)
    first, second = (chain.product for chain in chains)
    value, weight, weight2 = first.value, value_at(first.weight), value_at(second.weight)
    return (
        first.x is second.x
        and first.ends is second.ends
        and value.element_size() == 2
        # Autocast, which is on where these types differ, casts x for each product.
        and all(each.dtype == value.dtype for each in (value_at(first.x), weight, weight2, second.value))
        and same_sizes(second.value.shape, value.shape)
        and same_sizes(weight2.stride(), weight.stride())
        and not any(each.is_batch or (each.is_kn and each.ends is None) for each in (first, second))
        and not any(value_at(chain.nodes[-1]).requires_grad for chain in chains)
        and all(_are_of_its_sizes(chain) for chain in chains)
        and all(found[chain].why_not in ("", profit.SLOWER) for chain in chains)
    )


def _are_of_its_sizes(chain: Chain) -> bool:
    """Whether the operands have the shapes of the product's, as kernels read them. Else a `Site` reshapes them."""
    *lead, columns = chain.product.value.shape
    return all(
        same_sizes(value_at(source).shape, KINDS[each.kind].shape(lead, columns))
        and not (chain.product.ends is not None and KINDS[each.kind].is_of_columns)
        for each in chain.operands
        for source in each.sources
        if source is not None
    )


class TwoSites(Site):
    """Both chains as one call, with `Joined.sources` as arguments: the first one's site, if two calls are needed."""

    def __init__(self, both: Joined) -> None:
        super().__init__(both.first)
        self.__name__ += "_of_two"
        self._of_both = both.epilogue
        self._second = Site(both.second)
        self._place, self._others = both.place, len(both.second.operands)
        self._linked: Epilogue | None = None

    def __call__(self, x: Tensor, weight: Tensor, *sources: Any) -> Tensor:
        """Compute both chains."""
        weight2, *given = sources
        ends = [given.pop(0)] if self._is_grouped else []
        given.insert(self._others + self._place, None)
        operands = tuple(given)
        if self._linked is None:  # the operands' types are the same at each call of a graph
            self._linked = forms.of_types(self._of_both.traced, x, operands)
        is_invariant = invariance.active and invariance.enabled()
        call = LinearCall(self._linked, x, weight, operands, invariant=is_invariant, weight2=weight2)
        if ends:
            weights = {"weight": weight.transpose(1, 2), "weight2": weight2.transpose(1, 2)}
            call = call._replace(**weights, group_ends=ends[0])
        found = groups.pair(call)
        if isinstance(found, Tensor):
            return found
        others, own = given[: self._others], given[self._others :]
        own[self._place] = self._second(x, weight2, *ends, *others)
        return super().__call__(x, weight, *ends, *own)
