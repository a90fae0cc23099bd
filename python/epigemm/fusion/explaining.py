"""`epigemm.explain` of a fused model: its graphs, run node by node, so that each product has its layer's name."""

from __future__ import annotations

from typing import Any

from torch import fx

from epigemm.explain.listening import Listener, Place
from epigemm.fusion.report import FusedSite, FusionReport
from epigemm.fusion.rewrite import SITE, name_of


def run(graph_module: fx.GraphModule, report: FusionReport, listener: Listener, args: Any) -> Any:
    """Run one graph of a fused model."""
    listener.graphs += 1
    listener.notes += [note for note in report.notes if note not in listener.notes]
    with listener.resumed():
        return _Nodes(graph_module, report, listener).run(*args)


_NONE = "fuse takes no product of this form"


class _Nodes(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, report: FusionReport, listener: Listener) -> None:
        super().__init__(graph_module)
        self._listener = listener
        self._reasons = {each.name: each.reason for each in report.skipped}

    def run_node(self, node: fx.Node) -> Any:
        """Run the node, and tell the listener to which layer it belongs."""
        if node.op not in ("call_function", "call_method"):
            return super().run_node(node)
        site: FusedSite | None = node.meta.get(SITE)
        if site is not None:
            place = Place(site.name, "", site.function, (site.formula, *site.notes))
        else:
            name = name_of(node)
            place = Place(name, self._reasons.get(name, _NONE))
        with self._listener.at(place):
            return super().run_node(node)
