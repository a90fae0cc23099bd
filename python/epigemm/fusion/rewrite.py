"""Rewrites one of Dynamo's graphs: each product and its chain become one call."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, fx

from epigemm.fusion import formula, gates, layers, layouts, matmuls, pairs, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.report import FusedSite, FusionReport, Skipped
from epigemm.fusion.site import NormedProduct, NormSite, Site, find_normed
from epigemm.fusion.values import origin_of

T = TypeVar("T")
SITE = "epigemm_site"
"""The key in the `meta` of a fused call's node, for its entry of the report."""


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
        vars(mine).update({key: value for key, value in vars(other).items() if key not in vars(mine)})
        # Dynamo removes the model's inputs from its own graph later. A copy must not keep them.
        mine.meta = {key: value for key, value in other.meta.items() if key != "grapharg"}
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
        return _Found(graph, finder, skipped, judged if self.traced else gates.judged(graph, judged))

    def tried(
        self,
        found: _Found,
        names: Collection[str],
        change: Callable[[fx.Graph, Collection[str]], Mapping[str, T]],
        pays: Callable[[T, _Found], bool],
    ) -> tuple[_Found, Mapping[str, T]]:
        """Change a copy of a graph at the nodes of some names, then at those alone where that pays.

        Returns:
            The copy, and what was changed by name; the graph itself where nothing pays.
        """
        while names:
            made = change(graph := _copied(found.graph), names)
            tried = self.find(graph)
            names = [name for name, each in made.items() if pays(each, tried)]
            if names and len(names) == len(made):
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
    functions, left = layers.functions(found.graph), dict[str, str]()

    def is_taken(nodes: list[fx.Node], tried: _Found) -> bool:
        return any(chain.product.node in nodes for chain in tried.taken)

    write_out = partial(layers.write_out, left=left)
    found, made = settings.tried(found, functions, write_out, is_taken)
    others = [(function, left.get(name)) for name, function in functions.items() if name not in made]
    notes = (f"{function} stays as it is: {why or profit.SLOWER}" for function, why in others)
    return found, list(dict.fromkeys(notes))


def _rows_that_pay(found: _Found, settings: _Settings) -> tuple[_Found, list[str]]:
    """Copy operands with reordered axes where that allows sums to be fused."""

    def pays(copied: layouts.Copied, tried: _Found) -> bool:
        return copied.pays(node for chain in tried.taken for node in chain.nodes)

    found, made = settings.tried(found, layouts.sums(found.graph), layouts.put_in_rows, pays)
    return found, [
        f"{each.copy.args[0]} is copied once: sums with it then lie in rows" for each in made.values()
    ]


def _pairs_that_pay(found: _Found, settings: _Settings) -> tuple[_Found, list[str]]:
    """Replace products that are read by halves by two, where that is expected to be faster."""
    us = pairs.read_by_halves(found.graph, found.judged)

    def pays(pair: pairs.Pair, tried: _Found) -> bool:
        return pairs.pays(pair, tried.judged, one_by_one=settings.one_by_one)

    found, made = settings.tried(found, us, partial(pairs.take_apart, us=us), pays)
    said = "its halves are two products, of which one multiplies by the other"
    return found, [f"{name_of(pair.first)}: {said}" for pair in made.values()]


def _replace_all(found: _Found, normed: dict[Chain, NormedProduct]) -> dict[Chain, FusedSite]:
    """Replace chains by calls, the one that ends last first, because a chain may read results of those before it.

    So no call reads a node that has been removed. This is not the order of the products: in `a(x) * b(x)` the first
    product's chain reads the second product.
    """
    order = {node: place for place, node in enumerate(found.graph.nodes)}
    nodes = {
        chain: normed[chain].nodes if chain in normed else chain.nodes for chain in (*found.taken, *normed)
    }
    sites: dict[Chain, FusedSite] = {}
    for chain in sorted(nodes, key=lambda chain: order[nodes[chain][-1]], reverse=True):
        estimate = found.judged[chain]
        both: gates.Joined | None = estimate.both
        if chain in normed:
            norm = normed[chain]
            matched = tuple(node.name for node in norm.nodes)
            name = name_of(chain.product.node)
            sites[chain] = site = FusedSite(name, norm.function, matched, norm.text, (_OWN_STATISTICS,))
            _replace(NormSite(norm), norm.sources, norm.nodes, site, at=norm.norm)
        elif both is None:
            sites[chain] = site = _site_of(chain, profit.notes(chain, estimate))
            _replace(Site(chain), chain.sources, chain.nodes, site, views=chain.views)
        elif chain is both.first:
            sites[chain] = site = _site_of(chain, (_IN_ONE_KERNEL + name_of(both.second.product.node),))
            _replace(
                gates.TwoSites(both),
                both.sources,
                (*both.second.nodes, *chain.nodes),
                site,
                views=chain.views,
            )
        else:
            sites[chain] = _site_of(chain, (_IN_ONE_KERNEL + name_of(both.first.product.node),))
    return sites


_IN_ONE_KERNEL = "computed by one kernel with "
_OWN_STATISTICS = "by the batch's own statistics: one pass for the product with them, one that normalises"


def _replace(
    call: Callable[..., Tensor],
    sources: tuple[fx.Node | None, ...],
    nodes: tuple[fx.Node, ...],
    site: FusedSite,
    *,
    views: tuple[fx.Node, ...] = (),
    at: fx.Node | None = None,
) -> None:
    """Replace nodes by a call and views of its result. It takes the place of the last node, or of `at`."""
    tail = nodes[-1]
    at = at or tail
    with at.graph.inserting_before(at):
        fused = at.graph.call_function(call, sources)
        fused.meta = {**origin_of(at), SITE: site}
        for view in views:
            inputs = {node: fused if node in nodes else node for node in view.all_input_nodes}
            fused = at.graph.node_copy(view, inputs.__getitem__)
    fused.meta["example_value"] = tail.meta["example_value"]
    tail.replace_all_uses_with(fused)
    for node in reversed(nodes):
        tail.graph.erase_node(node)


def _site_of(chain: Chain, notes: tuple[str, ...]) -> FusedSite:
    product = chain.product
    text = "acc" if product.bias is None else "acc + c1"
    if chain.epilogue is not None:
        text = formula.text_of(chain.epilogue)
    elif chain.norm is not None:
        text = f"batch_norm({text})"
    notes = (*notes, f"ends: {chain.ended}") if chain.ended else notes
    matched = tuple(node.name for node in chain.nodes)
    return FusedSite(name_of(product.node), chain.function, matched, text, notes)


def name_of(node: fx.Node) -> str:
    """The name of a product's module, or of its node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = re.sub(r"^L(\['(self|fn|model)'\])?|__dict__\['_modules'\]|_modules|__self__", "", path)
    parts = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).split(".")
    return ".".join(filter(None, parts)) or node.name
