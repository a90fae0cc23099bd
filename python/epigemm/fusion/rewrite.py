"""The pass over one graph, for traced modules and for Dynamo's graphs alike: each chain becomes one call."""

from __future__ import annotations

from torch import nn
from torch.fx import Graph, Node

from epigemm.fusion import building, chains
from epigemm.fusion import operations as ops
from epigemm.fusion.chains import Chain
from epigemm.fusion.operations import Values
from epigemm.fusion.report import FusedSite, FusionReport, Skipped

_ALONE = "a linear layer alone: replaced for fp32 on CUDA, where products on fp16 pieces are faster"


def fuse_graph(graph: Graph, values: Values, place: str = "", *, keep_packs: bool = False) -> FusionReport:
    """Replace every chain of `graph` by one call, in place.

    Args:
        graph: the graph.
        values: what is known about its values.
        place: what the report puts before the names of nodes.
        keep_packs: whether fp32 parameters keep their fp16 pieces between calls (see `Site.is_parameter`).

    Returns:
        What was done. The graph is as it was where the report has no sites.
    """
    found = chains.find(graph, values)
    report = FusionReport()
    # The last one first: a chain reads the results of earlier ones, by the nodes that these replacements end.
    for chain in reversed(found.chains):
        report.sites.insert(0, _replace(graph, chain, values, place, keep_packs))
    for node, reason in found.left_alone:
        report.skipped.append(Skipped(_name(place, node), reason))
    return report


def _replace(graph: Graph, chain: Chain, values: Values, place: str, keep_packs: bool) -> FusedSite:
    name = _name(place, chain.first)
    matched = tuple(ops.describe(node, values) for node in chain.nodes)
    site = building.build(chain, values, name, keep_packs=keep_packs)
    with graph.inserting_before(chain.first):
        inputs = tuple(_input(graph, origin) for origin in site.origins)
        fused = graph.call_function(site, inputs)
    fused.meta = dict(chain.tail.meta)
    chain.tail.replace_all_uses_with(fused)
    for node in (*reversed(chain.nodes), *chain.helpers):
        if not node.users:
            graph.erase_node(node)
    return FusedSite(name, chain.function, matched, _notes(chain, values))


def _input(graph: Graph, origin: Node | str) -> Node:
    """A site's argument, where the site stands: modules and tensors that have names are named there once more."""
    if isinstance(origin, str):
        return graph.create_node("get_attr", origin)
    return graph.node_copy(origin) if ops.hoistable(origin) else origin


def _notes(chain: Chain, values: Values) -> tuple[str, ...]:
    notes = list(chain.notes)
    if chain.function == chains.LINEAR:
        notes.append(_ALONE)
    if chain.norm is not None and chain.norm.module:
        module = values.module(chain.nodes[-1])
        if isinstance(module, nn.BatchNorm1d) and module.training:
            notes.append("BatchNorm is in training mode: it runs as it is, after the product, until eval()")
    return tuple(notes)


def _name(place: str, node: Node) -> str:
    label = str(node.target) if node.op == "call_module" else node.name
    return f"{place}: {label}" if place else label
