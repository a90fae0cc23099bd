"""PyTorch's own attention and encoder layers, which are one node of a graph, replaced by the operators inside of them.

`F.multi_head_attention_forward` runs these operators anyway, so that nothing else changes. The fast path of
`nn.TransformerEncoderLayer` has kernels of its own: it is written out where a product of it is taken.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from epigemm.fusion.values import origin_of, same_layout, storage_of, tensor_of, value_of


def _encoder_layer(
    src: Tensor,
    width: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    is_gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> Tensor:
    """What `torch._transformer_encoder_layer_fwd` computes."""
    norm1, norm2, first, second = rest[:2], rest[2:4], rest[4:6], rest[6:8]
    if any(each is not None for each in rest[8:]):
        raise Left("it has a mask")

    def attention(x: Tensor) -> Tensor:
        qkv = F.linear(x, qkv_weight, qkv_bias)
        q, k, v = torch.unflatten(qkv, -1, (3, heads, width // heads)).transpose(1, 3).unbind(2)
        found = F.scaled_dot_product_attention(q, k, v)
        return F.linear(found.transpose(1, 2).flatten(2), out_weight, out_bias)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, *first)
        return F.linear(F.gelu(hidden) if is_gelu else F.relu(hidden), *second)

    def norm(x: Tensor, vectors: tuple[Tensor, ...]) -> Tensor:
        weight, bias = vectors
        return F.layer_norm(x, (width,), weight, bias, eps)

    if norm_first:
        x = src + attention(norm(src, norm1))
        return x + feed_forward(norm(x, norm2))
    x = norm(src + attention(src), norm1)
    return norm(x + feed_forward(x), norm2)


def _body(function: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional without its question whether a mode wants the whole call."""
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_WRITTEN: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _body(F.multi_head_attention_forward),
    torch._transformer_encoder_layer_fwd: _encoder_layer,
}


def layers_of(graph: fx.Graph) -> list[fx.Node]:
    """The layers of a graph."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in _WRITTEN]


def write_out(graph: fx.Graph, only: Collection[str], left: dict[str, str]) -> dict[str, list[fx.Node]]:
    """Replace the layers of these names; what each was replaced by. `left` gets the reasons why others are not."""
    made: dict[str, list[fx.Node]] = {}
    for node in layers_of(graph):
        if node.name not in only:
            continue
        inserter = Inserter(node)
        results = [each for each in tree_leaves(value_of(node)) if isinstance(each, Tensor)]
        learns = any(each.requires_grad for each in results)
        try:
            found = inserter.run(_WRITTEN[node.target], node.args, node.kwargs, learns=learns)
            _replace(node, found, inserter)
            made[node.name] = inserter.made
        except Exception as error:  # any error of the function with such tensors
            left[node.name] = str(error) if isinstance(error, Left) else "it cannot be written out"
            for each in reversed(inserter.made):
                graph.erase_node(each)
    return made


def _replace(node: fx.Node, results: list[fx.Node | None], inserter: Inserter) -> None:
    """Have the results read in place of the layer's."""
    is_one = tensor_of(node) is not None
    if not is_one and any(user.target is not operator.getitem for user in node.users):
        raise Left("its results are read together")
    ends = {node: results[0]} if is_one else {user: results[user.args[1]] for user in node.users}  # type: ignore[index]
    for old, new in ends.items():
        if new is None:
            if old.users:
                raise Left("a result that is None is read")
            continue
        was, now = tensor_of(old), tensor_of(new)
        if was is None or now is None or not same_layout(was, now) or was.dtype != now.dtype:
            raise Left("its result is of another layout or type")
        if was.requires_grad != now.requires_grad or was.storage_offset() != now.storage_offset():
            raise Left("its result has another derivative or place")
    for old, new in ends.items():
        if new is not None:
            _share(old, new, inserter)
            old.replace_all_uses_with(new)
    for old in [*ends, *([] if is_one else [node])]:
        node.graph.erase_node(old)


def _share(old: fx.Node, new: fx.Node, inserter: Inserter) -> None:
    """Give the new nodes of one memory the memory of the old result, with which values that follow may be noted."""
    was, now = tensor_of(old), tensor_of(new)
    assert isinstance(was, FakeTensor) and now is not None
    memory = storage_of(now)
    for each in inserter.made:
        value = tensor_of(each)
        if value is not None and storage_of(value) == memory:
            with was.fake_mode, torch.set_grad_enabled(value.requires_grad):
                made = was.as_strided(value.shape, value.stride(), value.storage_offset())
            each.meta["example_value"] = made


# --- operators of a function, put into a graph ------------------------------------------------------------------------


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
