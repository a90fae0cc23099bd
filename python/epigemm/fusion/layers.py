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

from epigemm.fusion.values import same_layout, storage_of, tensor_of, value_of


class _Left(Exception):
    """The error: why a layer is not written out."""


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
        raise _Left("it has a mask")

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


def found(graph: fx.Graph) -> list[fx.Node]:
    """The layers of a graph."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in _WRITTEN]


def write_out(
    graph: fx.Graph, only: Collection[str] | None = None
) -> tuple[dict[str, list[fx.Node]], dict[str, str]]:
    """Replace layers, or those of some names; what each was replaced by, and why others are as they were."""
    made: dict[str, list[fx.Node]] = {}
    left: dict[str, str] = {}
    for node in found(graph):
        if only is not None and node.name not in only:
            continue
        recorder = _Recorder(node)
        try:
            with graph.inserting_before(node):
                results = recorder.run(_WRITTEN[node.target])
            _replace(node, results, recorder)
            made[node.name] = recorder.made
        except Exception as error:  # any error of the function with such tensors
            left[node.name] = str(error) if isinstance(error, _Left) else "it cannot be written out"
            for each in reversed(recorder.made):
                graph.erase_node(each)
    return made, left


class _Recorder(TorchFunctionMode):
    """Runs a function on tensors without data, and puts each operator into the graph."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.made: list[fx.Node] = []
        self._origin = node
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []  # of which the ids are keys

    def run(self, function: Callable[..., Any]) -> list[fx.Node | None]:
        """The nodes of its results."""
        node = self._origin
        for each in node.all_input_nodes:
            value = tensor_of(each)
            if not isinstance(value, FakeTensor):
                raise _Left("an argument is no plain tensor")
            self._note(value, each)
        results = [each for each in tree_leaves(value_of(node)) if isinstance(each, Tensor)]
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        learns = any(each.requires_grad for each in results)
        with self._kept[0].fake_mode, torch.set_grad_enabled(learns), self:  # type: ignore[attr-defined]
            given = function(*args, **kwargs)
        parts = given if isinstance(given, tuple) else (given,)
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
        made = self._origin.graph.create_node(op, target, *given)
        kept = ("stack_trace", "nn_module_stack")
        made.meta = {key: self._origin.meta[key] for key in kept if key in self._origin.meta}
        made.meta["example_value"] = result
        self.made.append(made)
        return made

    def _size(self, size: torch.SymInt) -> fx.Node | int:
        """The node of a size, computed from those of the graph's symbols."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        nodes = self._origin.graph.find_nodes(op="placeholder")
        symbols = {
            value.node.expr: each for each in nodes if isinstance(value := value_of(each), torch.SymInt)
        }
        expression = size.node.expr
        if not expression.free_symbols <= symbols.keys():
            raise _Left("its sizes are symbolic")
        given = {symbol: fx.Proxy(symbols[symbol]) for symbol in expression.free_symbols}
        found = sympy_interp(PythonReferenceAnalysis, given, expression)
        if not isinstance(found, fx.Proxy):
            return int(found)
        new, waiting = list[fx.Node](), [found.node]
        while waiting:
            each = waiting.pop()
            if "example_value" not in each.meta:
                each.meta["example_value"] = size  # some number
                new.append(each)
                waiting += each.all_input_nodes
        self.made += reversed(new)
        return found.node


def _replace(node: fx.Node, results: list[fx.Node | None], recorder: _Recorder) -> None:
    """Have the results read in place of the layer's."""
    is_one = tensor_of(node) is not None
    if not is_one and any(user.target is not operator.getitem for user in node.users):
        raise _Left("its results are read together")
    ends = {node: results[0]} if is_one else {user: results[user.args[1]] for user in node.users}  # type: ignore[index]
    for old, new in ends.items():
        if new is None:
            if old.users:
                raise _Left("a result that is None is read")
            continue
        was, now = tensor_of(old), tensor_of(new)
        if was is None or now is None or not same_layout(was, now) or was.dtype != now.dtype:
            raise _Left("its result is of another layout or type")
        if was.requires_grad != now.requires_grad or was.storage_offset() != now.storage_offset():
            raise _Left("its result has another derivative or place")
    for old, new in ends.items():
        if new is not None:
            _share(old, new, recorder)
            old.replace_all_uses_with(new)
    for old in [*ends, *([] if is_one else [node])]:
        node.graph.erase_node(old)


def _share(old: fx.Node, new: fx.Node, recorder: _Recorder) -> None:
    """Give the new nodes of one memory the memory of the old result, with which values that follow may be noted."""
    was, now = tensor_of(old), tensor_of(new)
    assert isinstance(was, FakeTensor) and now is not None
    memory = storage_of(now)
    for each in recorder.made:
        value = tensor_of(each)
        if value is not None and storage_of(value) == memory:
            with was.fake_mode, torch.set_grad_enabled(value.requires_grad):
                made = was.as_strided(value.shape, value.stride(), value.storage_offset())
            each.meta["example_value"] = made
