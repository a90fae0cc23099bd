"""Rewrites one of Dynamo's graphs: each product and its chain become one call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from torch import fx

from epigemm.fusion import formula, gates, layers, layouts, matmuls, pairs, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.report import FusedSite, FusionReport, Skipped
from epigemm.fusion.site import SITE, Replacement, Site, find_normed, name_of
from epigemm.fusion.values import origin_of

T = TypeVar("T")


class FusionError(RuntimeError):
    """epigemm's rewriting of a graph failed, and `strict` is True. Its cause is the original error."""


def first_line(error: Exception) -> str:
    """An error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@cache
def warn_once(text: str) -> None:
    """Warn, the first time that a text is given."""
    warnings.warn(text, stacklevel=2)


def fuse_module(graph_module: fx.GraphModule, *, strict: bool, **settings: Any) -> FusionReport:
    """`fuse_graph` for a module's graph. If it fails, the module is not changed, the report says so, and one warning.

    Raises:
        FusionError: it fails, and `strict` is True.
    """
    was = graph_module.graph
    try:
        graph, report = fuse_graph(was, **settings)
        if report.sites:
            graph.lint()
            graph_module.graph = graph
        return report
    except Exception as error:  # an error of the rewriting must not be an error of the model
        graph_module.graph = was
        text = first_line(error)
        if strict:
            raise FusionError(f"epigemm's pass failed on a graph: {text}") from error
    reason = f"epigemm's pass failed, and it runs as it was: {text}"
    warn_once(f"a graph of a fused model: {reason}")
    return FusionReport(skipped=[Skipped("graph", reason)])


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy, with the attributes that Dynamo has given to nodes."""
    copied = copy.deepcopy(graph)
    copied.owning_module = graph.owning_module  # which has the values of attributes
    for mine, other in zip(copied.nodes, graph.nodes, strict=True):
        vars(mine).update({**vars(other), **vars(mine)})
        mine.meta = dict(other.meta)
        mine.meta.pop("grapharg", None)  # Dynamo removes the model's inputs from its own graph later
    return copied


class _Found(NamedTuple):
    """A graph and what is in it.

    Attributes:
        graph: the graph.
        finder: of its chains.
        skipped: the products that cannot be fused.
        judged: the chains, the last one first, with their estimates.
    """

    graph: fx.Graph
    finder: ChainFinder
    skipped: list[Skipped]
    judged: dict[Chain, profit.Judged]

    @property
    def taken(self) -> dict[Chain, profit.Judged]:
        """The chains that are worth a fused call."""
        return {chain: each for chain, each in self.judged.items() if not each.why_not}


class _Settings(NamedTuple):
    """Arguments of `fuse_graph`."""

    one_by_one: bool
    traced: bool

    def find(self, graph: fx.Graph) -> _Found:
        """The chains of a graph."""
        skipped, finder, judged = list[Skipped](), ChainFinder(graph), dict[Chain, profit.Judged]()
        # The last one first, so that of two products that are multiplied each gets the operators that follow it alone.
        for node in reversed(list(graph.nodes)):
            understood = matmuls.understand(node)
            if understood is not None:
                understood = finder.why_not(node, understood) or understood
            if isinstance(understood, str):
                skipped.insert(0, Skipped(name_of(node), understood))
            elif understood is not None:
                chain = finder.chain(understood)
                judged[chain] = profit.judged(chain, is_eager=self.one_by_one)
        return _Found(graph, finder, skipped, gates.judged(graph, judged, traced=self.traced))

    def tried(
        self,
        found: _Found,
        change: Callable[[fx.Graph, Collection[str]], Mapping[str, T]],
        pays: Callable[[T, _Found], bool],
    ) -> tuple[_Found, Mapping[str, T]]:
        """Change a copy of a graph wherever it can be, then another one where that pays alone.

        Returns:
            The copy, and what was changed by name; the graph itself where nothing pays.
        """
        names = {node.name for node in found.graph.nodes}
        while made := change(graph := _copied(found.graph), names):
            tried = self.find(graph)
            names = {name for name, each in made.items() if pays(each, tried)}
            if len(names) == len(made):
                return tried, made
        return found, {}


def fuse_graph(
    graph: fx.Graph, *, one_by_one: bool = True, traced: bool = False
) -> tuple[fx.Graph, FusionReport]:
    """Replace products of a copy of `graph` with their chains by one call each, where that is expected to be faster.

    Args:
        graph: Dynamo's.
        one_by_one: whether each operator that is not fused has kernels of its own.
        traced: whether a compiler traces the graph. It sees two calls of operators where one kernel could run.

    Returns:
        The copy and the report.
    """
    settings, notes = _Settings(one_by_one, traced), list[str]()
    found = settings.find(_copied(graph))
    for rewriting in (_layers_that_pay, _rows_that_pay, _pairs_that_pay):
        found, said = rewriting(found, settings)
        notes += said
    judged = found.judged
    report = FusionReport(skipped=found.skipped, notes=notes)
    normed = {} if traced else find_normed(found.finder, judged)
    fused = _replace_all(found, normed)
    for chain in judged:
        reason = judged[chain].why_not
        is_taken = chain.computes and (chain in normed or not reason)
        report.chains = (report.chains[0] + chain.is_followed, report.chains[1] + is_taken)
        if chain.is_followed and not is_taken:
            report.not_taken.insert(0, Skipped(name_of(chain.product.node), reason or chain.ended))
        if chain in fused:
            report.sites.insert(0, fused[chain])
        else:
            report.skipped.insert(0, Skipped(name_of(chain.product.node), reason))
    return found.graph, report


def _layers_that_pay(found: _Found, settings: _Settings) -> tuple[_Found, list[str]]:
    """Write out PyTorch's own layers of which a product is taken; a note for each kind of others."""
    every: list[Any] = layers.layers_of(found.graph)
    left: dict[str, str] = {}

    def is_taken(nodes: list[fx.Node], tried: _Found) -> bool:
        return any(chain.product.node in nodes for chain in tried.taken)

    write_out = partial(layers.write_out, left=left)
    found, made = settings.tried(found, write_out, is_taken)
    others = [(node.target, left.get(node.name, profit.SLOWER)) for node in every if node.name not in made]
    return found, list(dict.fromkeys(f"{layer.__name__} stays as it is: {why}" for layer, why in others))


def _rows_that_pay(found: _Found, settings: _Settings) -> tuple[_Found, list[str]]:
    """Copy operands with reordered axes where that allows sums to be fused."""

    def replaced(of: _Found) -> set[str]:
        return {node.name for chain in of.taken for node in chain.nodes}

    before = replaced(found)
    found, made = settings.tried(
        found, layouts.put_in_rows, lambda copied, tried: copied.pays(replaced(tried), before)
    )
    return found, [
        f"{each.copy.args[0]} is copied once: sums with it then lie in rows" for each in made.values()
    ]


def _pairs_that_pay(found: _Found, settings: _Settings) -> tuple[_Found, list[str]]:
    """Replace products that are read by halves by two, where that is expected to be faster."""

    def pays(pair: pairs.Pair, tried: _Found) -> bool:
        return pairs.pays(pair, tried.judged, one_by_one=settings.one_by_one)

    take_apart = partial(pairs.take_apart, us=pairs.times(found.judged))
    found, made = settings.tried(found, take_apart, pays)
    said = "its halves are two products, of which one multiplies by the other"
    return found, [f"{name_of(pair.first)}: {said}" for pair in made.values()]


def _replace_all(found: _Found, normed: dict[Chain, Replacement]) -> dict[Chain, FusedSite]:
    """Replace chains by calls, the one that ends last first, because a chain may read results of those before it.

    So no call reads a node that has been removed. This is not the order of the products: in `a(x) * b(x)` the first
    product's chain reads the second product.
    """
    order = {node: place for place, node in enumerate(found.graph.nodes)}
    made = {chain: _replacement(chain, each) for chain, each in found.taken.items()} | normed
    calls = [each for each in made.values() if each.nodes]
    for each in sorted(calls, key=lambda each: order[each.nodes[-1]], reverse=True):
        _replace(each)
    return {chain: each.site for chain, each in made.items()}


def _replacement(chain: Chain, estimate: profit.Judged) -> Replacement:
    """The call of a chain; without nodes for the second of two chains, which the first one's call replaces."""
    both: gates.Joined | None = estimate.both
    notes = profit.notes(chain, estimate)
    if both is not None:
        other = both.second if chain is both.first else both.first
        notes = (f"computed by one kernel with {name_of(other.product.node)}",)
    if chain.ended:
        notes = (*notes, f"ends: {chain.ended}")
    text = "acc" if chain.product.bias is None else "acc + c1"
    if chain.epilogue is not None:
        text = formula.text_of(chain.epilogue)
    elif chain.norm is not None:
        text = f"batch_norm({text})"
    if chain.out_scale is not None:
        text = f"e4m3(({text}) / scale)" if isinstance(chain.out_scale, fx.Node) else f"e4m3({text})"
    matched = tuple(node.name for node in chain.nodes)
    site = FusedSite(name_of(chain.product.node), chain.function, matched, text, notes)
    if both is None:
        return Replacement(Site(chain), chain.sources, chain.nodes, site, chain.views)
    nodes = both.nodes if chain is both.first else ()
    return Replacement(gates.TwoSites(both), both.sources, nodes, site, chain.views)


def _replace(made: Replacement) -> None:
    """Replace nodes by a call and views of its result."""
    tail = made.nodes[-1]
    at = made.at or tail
    with at.graph.inserting_before(at):
        fused = at.graph.call_function(made.call, made.arguments)
        fused.meta = {**origin_of(at), SITE: made.site}
        for view in made.views:
            inputs = {node: fused if node in made.nodes else node for node in view.all_input_nodes}
            fused = at.graph.node_copy(view, inputs.__getitem__)
    fused.meta["example_value"] = tail.meta["example_value"]
    tail.replace_all_uses_with(fused)
    for node in reversed(made.nodes):
        tail.graph.erase_node(node)
