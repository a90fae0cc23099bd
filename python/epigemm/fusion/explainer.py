"""`epigemm.explain` of a fused model: its graphs, run node by node, so that each product has its layer's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from epigemm.explain.answer import Product
from epigemm.explain.listener import Listener
from epigemm.fusion.model import call_of, calling, is_fused, settings_for
from epigemm.fusion.report import FusedSite, FusionReport
from epigemm.fusion.rewrite import SITE, name_of


@contextmanager
def interpreted(model: nn.Module, listener: Listener) -> Iterator[None]:
    """Have calls of the fused modules in a model, or of the model itself if there is none, run their graphs so.

    Nothing is compiled. A module runs the graphs that it would have compiled.
    """
    with ExitStack() as stack:
        for module in [each for each in model.modules() if is_fused(each)] or [model]:
            stack.enter_context(calling(module, _call_of(module, listener)))
        yield


def _call_of(module: nn.Module, listener: Listener) -> Callable[..., Any]:
    settings = settings_for(module)

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        report = settings.rewrite(graph_module)

        def run(*args: Any) -> Any:
            listener.graphs += 1
            listener.notes += [note for note in report.notes if note not in listener.notes]
            with listener:
                return _Nodes(graph_module, report, listener, listener.name_of(module)).run(*args)

        return run

    compiled = torch.compile(call_of(module), backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with listener.closed():
            return compiled(*args, **kwargs)

    return call


class _Nodes(fx.Interpreter):
    """Runs each node with the listener told of which product it is."""

    def __init__(
        self, graph_module: fx.GraphModule, report: FusionReport, listener: Listener, within: str
    ) -> None:
        super().__init__(graph_module)
        self._listener, self._within = listener, within
        self._reasons = {each.name: each.reason for each in report.skipped}

    def run_node(self, node: fx.Node) -> Any:
        """As the interpreter."""
        if node.op not in ("call_function", "call_method"):
            return super().run_node(node)
        site: FusedSite | None = node.meta.get(SITE)
        if site is not None:
            product = Product(site.name, site.function, notes=(site.formula, *site.notes))
        else:
            name = name_of(node)
            product = Product(name, why=self._reasons.get(name, "fuse takes no product of this form"))
        named = f"{self._within}.{product.name}" if self._within else product.name
        with self._listener.at(replace(product, name=named)):
            return super().run_node(node)
