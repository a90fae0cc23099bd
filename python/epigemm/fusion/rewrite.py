"""Rewrites one of Dynamo's graphs: each product and its chain become one call."""

from __future__ import annotations

import copy
import re
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from epigemm.fusion import formula, gates, layers, layouts, matmuls, norms, pairs, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.report import FusedSite, FusionReport, Skipped
from epigemm.fusion.site import Site
from epigemm.fusion.values import tensor_of

SITE = "epigemm_site"
"""The key in the `meta` of a fused call's node, for its entry of the report."""


class FusionError(RuntimeError):
    """epigemm's rewriting of a graph failed, and `strict` is True. Its cause is the original error."""


def failed(error: Exception, *, strict: bool) -> Skipped:
    """The report's entry for a graph that could not be rewritten, with one warning; a `FusionError` if `strict`."""
    text = first_line(error)
    reason = f"epigemm's pass failed, and it runs as it was: {text}"
    if strict:
        raise FusionError(f"epigemm's pass failed on a graph: {text}") from error
    warn_once(f"a graph of a fused model: {reason}")
    return Skipped("graph", reason)


def first_line(error: Exception) -> str:
    """An error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@cache
def warn_once(text: str) -> None:
    """Warn, the first time that a text is given."""
    warnings.warn(text, stacklevel=2)


def fuse_module(graph_module: fx.GraphModule, *, strict: bool, **settings: Any) -> FusionReport:
    """`fuse_graph` for a module's graph. If it fails, the module is not changed: see `failed`."""
    graph = graph_module.graph
    was = _copied(graph)
    for mine, other in zip(was.nodes, graph.nodes, strict=True):
        mine.meta = other.meta  # Dynamo removes entries later, which must not stay in a copy
    try:
        report = fuse_graph(graph, **settings)
        if report.sites:
            graph.lint()
            graph_module.recompile()
        return report
    except Exception as error:  # an error of the rewriting must not be an error of the model
        graph_module.graph = was
        return FusionReport(skipped=[failed(error, strict=strict)])


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy, with the attributes that Dynamo has given to nodes."""
    copied = copy.deepcopy(graph)
    for mine, other in zip(copied.nodes, graph.nodes, strict=True):
        vars(mine).update({key: value for key, value in vars(other).items() if key not in vars(mine)})
        mine.meta = dict(other.meta)
    return copied


def fuse_graph(
    graph: fx.Graph, *, keep_packs: bool = False, one_by_one: bool = True, traced: bool = False
) -> FusionReport:
    """Replace products of `graph` with their chains by one call each, in place, where that is expected to be faster.

    Args:
        graph: Dynamo's.
        keep_packs: whether fp32 parameters keep their fp16 slices between calls.
        one_by_one: whether each operator that is not fused has kernels of its own.
        traced: whether a compiler traces the graph. It sees two calls of operators where one kernel could run.

    Returns:
        The report. If it has no sites, the graph has not been changed.
    """
    settings = _Settings(keep_packs, one_by_one, traced)
    left = _layers_that_pay(graph, settings)
    left += _rows_that_pay(graph, settings)
    two = _pairs_that_pay(graph, settings)
    report, judged = _judged(graph, settings)
    report.notes += [*left, *pairs.notes(two, name_of)]
    found = {} if traced else norms.find(graph, judged)
    taken = [chain for chain, each in judged.items() if not (each.why_not or chain in found)]
    fused = _replace_all(graph, {chain: judged[chain] for chain in taken}, keep_packs)
    fused |= {chain: _replace_norm(graph, chain, each, keep_packs) for chain, each in found.items()}
    for chain in judged:
        reason = judged[chain].why_not
        is_taken = chain.computes and (chain in found or not reason)
        report.chains = (report.chains[0] + chain.is_followed, report.chains[1] + is_taken)
        if chain.is_followed and not is_taken:
            report.not_taken.insert(0, Skipped(name_of(chain.product.node), reason or chain.ended))
        if chain in fused:
            report.sites.insert(0, fused[chain])
        else:
            report.skipped.insert(0, Skipped(name_of(chain.product.node), reason))
    return report


class _Settings(NamedTuple):
    """Arguments of `fuse_graph`."""

    keep_packs: bool
    one_by_one: bool
    traced: bool

    def judged(self, chain: Chain) -> profit.Judged:
        """The estimate for a chain by itself."""
        return profit.judged(chain, keeps_pack=_keeps(chain, self.keep_packs), is_eager=self.one_by_one)


def _layers_that_pay(graph: fx.Graph, settings: _Settings) -> list[str]:
    """Write out PyTorch's own layers of which a product is taken, tried on a copy; a note for each kind of others."""
    every = layers.found(graph)
    if not every:
        return []
    made, left = layers.write_out(trial := _copied(graph))
    _, judged = _judged(trial, settings)
    taken = {chain.product.node for chain, each in judged.items() if not each.why_not}
    layers.write_out(graph, [name for name, nodes in made.items() if not taken.isdisjoint(nodes)])
    reasons = {name: profit.SLOWER for name, nodes in made.items() if taken.isdisjoint(nodes)} | left
    functions = {node.name: node.target.__name__ for node in every}  # type: ignore[union-attr]
    return list(dict.fromkeys(f"{functions[name]} stays as it is: {why}" for name, why in reasons.items()))


def _rows_that_pay(graph: fx.Graph, settings: _Settings) -> list[str]:
    """Copy operands with reordered axes where that allows sums to be fused, and note it."""
    copies = layouts.put_in_rows(graph)
    _, judged = _judged(graph, settings) if copies else (None, {})
    if not layouts.pay(
        copies, (node for chain, each in judged.items() if not each.why_not for node in chain.nodes)
    ):
        while copies:
            copies.pop().undo()
    return [f"{copied.copy.args[0]} is copied once: sums with it then lie in rows" for copied in copies]


def _pairs_that_pay(graph: fx.Graph, settings: _Settings) -> list[pairs.Pair]:
    """Replace products that are read by halves by two, where that is expected to be faster: tried on a copy first."""
    if not pairs.read_by_halves(graph):
        return []
    trial = _copied(graph)
    two = pairs.take_apart(trial, settings.judged)
    _, judged = _judged(trial, settings)
    lost = pairs.lost(two, judged, one_by_one=settings.one_by_one)
    return pairs.take_apart(graph, settings.judged, leave=lost)


def _judged(graph: fx.Graph, settings: _Settings) -> tuple[FusionReport, dict[Chain, profit.Judged]]:
    """The chains of a graph, the last one first, with their estimates; and a report of products without one."""
    report, finder, judged = FusionReport(), ChainFinder(graph), {}
    # The last one first, so that of two products that are multiplied each gets the operators that follow it alone.
    for node in reversed(list(graph.nodes)):
        understood = matmuls.understand(node)
        if understood is not None:
            understood = finder.why_not(node, understood) or understood
        if isinstance(understood, str):
            report.skipped.insert(0, Skipped(name_of(node), understood))
        elif understood is not None:
            chain = finder.chain(understood)
            judged[chain] = settings.judged(chain)
    return report, judged if settings.traced else gates.judged(graph, judged)


def _keeps(chain: Chain, keep_packs: bool) -> bool:
    return keep_packs and isinstance(tensor_of(chain.product.weight), torch.nn.Parameter)


def _replace_all(
    graph: fx.Graph, judged: dict[Chain, profit.Judged], keep_packs: bool
) -> dict[Chain, FusedSite]:
    """Replace chains, the one that ends last first, because a chain may read results of chains that end before it.

    So no call reads a node that has been removed. This is not the order of the products: in `a(x) * b(x)` the first
    product's chain reads the second product.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    chains = sorted(judged, key=lambda chain: order[chain.nodes[-1]], reverse=True)
    # What they read is collected before nodes are removed.
    notes = {chain: profit.notes(chain, judged[chain]) for chain in chains}
    sites = {}
    for chain in chains:
        both = judged[chain].both
        if both is None or chain is both.first:
            sites[chain] = _replace(graph, chain, _keeps(chain, keep_packs), notes[chain], both)
    for chain in chains:
        if chain not in sites:
            sites[chain] = _site_of(chain, (_IN_ONE_KERNEL + name_of(judged[chain].both.first.product.node),))
    return sites


_IN_ONE_KERNEL = "computed by one kernel with "


def _replace(
    graph: fx.Graph,
    chain: Chain,
    keeps_pack: bool,
    notes: tuple[str, ...] = (),
    both: gates.Joined | None = None,
) -> FusedSite:
    """Replace a chain by one call. `both`: the pair of which it is the first chain; the second one is replaced, too."""
    one = Site(chain, keeps_pack)
    site: Site | gates.TwoSites = one
    if both is not None:
        site = gates.TwoSites(both, one, Site(both.second, keeps_pack))
        notes = (_IN_ONE_KERNEL + name_of(both.second.product.node), *notes)
    tail = chain.nodes[-1]
    with graph.inserting_before(tail):
        fused = graph.call_function(site, chain.sources if both is None else both.sources)
        fused.meta = {key: tail.meta[key] for key in ("stack_trace", "nn_module_stack") if key in tail.meta}
        for view in chain.views:
            inputs = {node: fused if node in chain.nodes else node for node in view.all_input_nodes}
            fused = graph.node_copy(view, inputs.__getitem__)
    fused.meta["example_value"] = tail.meta["example_value"]
    tail.replace_all_uses_with(fused)
    gone = chain.nodes if both is None else (*both.second.nodes, *chain.nodes)
    for node in reversed(gone):
        graph.erase_node(node)
    fused.meta[SITE] = _site_of(chain, notes)
    return fused.meta[SITE]  # type: ignore[no-any-return]


def _replace_norm(graph: fx.Graph, chain: Chain, found: norms.Found, keep_packs: bool) -> FusedSite:
    """Replace a product and the BatchNorm behind it by one call."""
    name, has_bias = name_of(chain.product.node), chain.product.bias is not None
    matched = tuple(node.name for node in found.nodes)
    text = norms.text_of(found, has_bias=has_bias)
    fused = norms.replace(graph, found, keeps_pack=_keeps(chain, keep_packs))
    function = "linear_batch_norm" if found.relu is None else "linear_batch_norm_relu"
    fused.meta[SITE] = FusedSite(name, function, matched, text, (_OWN_STATISTICS,))
    return fused.meta[SITE]  # type: ignore[no-any-return]


_OWN_STATISTICS = "by the batch's own statistics: one pass for the product with them, one that normalises"


def _site_of(chain: Chain, notes: tuple[str, ...]) -> FusedSite:
    product = chain.product
    text = "acc" if product.bias is None else "acc + c1"
    if chain.epilogue is not None:
        text = formula.text_of(chain.epilogue)
    elif chain.norm is not None:
        text = "batch_norm(acc)" if product.bias is None else "batch_norm(acc + c1)"
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
