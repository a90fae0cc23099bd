"""Puts the operators of a Python function into a graph, with their results on tensors without data."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from epigemm.fusion.values import origin_of, tensor_of, value_of


class Left(Exception):
    """The error: why a graph is left as it was."""


class Inserter(TorchFunctionMode):
    """Puts what functions call before a node, as if that had been written in its place.

    Attributes:
        made: the new nodes, in order.
    """

    def __init__(self, place: fx.Node) -> None:
        super().__init__()
        self.made: list[fx.Node] = []
        self._place = place
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []  # of which the ids are keys

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any = None, *, learns: bool) -> list[Any]:
        """The nodes of a function's results, and None for those that are None; `learns`: with gradients on."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, fx.Node) and isinstance(value_of(each), Tensor):
                value = tensor_of(each)
                if not isinstance(value, FakeTensor):
                    raise Left("an argument is no plain tensor")
                self._note(value, each)
        given, named = fx.map_arg((args, kwargs or {}), value_of)
        mode = self._kept[0].fake_mode  # type: ignore[attr-defined]
        with mode, torch.set_grad_enabled(learns), self._place.graph.inserting_before(self._place), self:
            found = function(*given, **named)
        parts = found if isinstance(found, tuple) else (found,)
        return [None if each is None else self._nodes[id(each)] for each in parts]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if tensors:
            made = self._add(func, args, kwargs or {}, result)
            for place, each in enumerate(tensors):
                is_one = each is result
                self._note(each, made if is_one else self._add(operator.getitem, (made, place), {}, each))
        return result

    def _note(self, value: Tensor, node: fx.Node) -> None:
        self._nodes[id(value)] = node
        self._kept.append(value)

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        def node_of(part: Any) -> Any:
            if isinstance(part, torch.SymInt):
                return self._size(part)
            return self._nodes[id(part)] if isinstance(part, Tensor) else part

        given = tree_map(node_of, (args, kwargs))
        name = getattr(func, "__name__", "")
        if func is Tensor.__getitem__:
            func = operator.getitem
        is_method = getattr(Tensor, name, None) is func
        op, target = ("call_method", name) if is_method else ("call_function", func)
        made = self._place.graph.create_node(op, target, *given)
        made.meta = {**origin_of(self._place), "example_value": result}
        self.made.append(made)
        return made

    def _size(self, size: torch.SymInt) -> fx.Node | int:
        """The node of a size, computed from those of the graph's symbols."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        nodes = self._place.graph.find_nodes(op="placeholder")
        symbols = {
            value.node.expr: each for each in nodes if isinstance(value := value_of(each), torch.SymInt)
        }
        expression = size.node.expr
        if not expression.free_symbols <= symbols.keys():
            raise Left("its sizes are symbolic")
        given = {symbol: fx.Proxy(symbols[symbol]) for symbol in expression.free_symbols}
        node = self._place.prev
        found = sympy_interp(PythonReferenceAnalysis, given, expression)
        while (node := node.next) is not self._place:
            node.meta["example_value"] = size  # some number
            self.made.append(node)
        return found.node if isinstance(found, fx.Proxy) else int(found)
