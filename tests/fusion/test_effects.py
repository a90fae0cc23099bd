"""What is known of a node's effects: writes to memory, changes of the mode; nothing is guessed by a name."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from epigemm.fusion import effects
from epigemm.fusion.dynamo import GraphValues
from tests.fusion import graphs  # defines operators  # noqa: F401

_t: Any = torch
_aten: Any = torch.ops.aten
_own: Any = torch.ops.epigemm_tests
_F: Any = F
X = "the tensor"


def anything(x: Tensor) -> Tensor:
    return x


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x


def node_of(op: str, target: Any, *args: Any, **kwargs: Any) -> tuple[fx.Node, GraphValues]:
    """A node whose argument X is a tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = fx.node.map_aggregate(args, lambda a: x if isinstance(a, str) and a == X else a)
    named = {name: x if isinstance(value, str) and value == X else value for name, value in kwargs.items()}
    node = graph.create_node(op, target, given, named)
    root = nn.ModuleDict({"fc": nn.Linear(2, 2), "odd": nn.Sequential(nn.ReLU(), Odd())})
    return node, GraphValues(fx.GraphModule(root, graph))


FUNCTION, METHOD, MODULE = "call_function", "call_method", "call_module"
PURE: list[Any] = [
    (FUNCTION, torch.add, (X, 1), {}),
    (FUNCTION, torch.cat, ([X, X],), {}),
    (FUNCTION, torch.softmax, (X, 0), {}),
    (FUNCTION, torch.nn.functional.gelu, (X,), {}),
    (FUNCTION, F.layer_norm, (X, (2,)), {}),
    (FUNCTION, F.dropout, (X, 0.5, True), {}),
    (FUNCTION, F.embedding, (X, X), {}),
    (FUNCTION, F.batch_norm, (X, X, X), {}),
    (FUNCTION, F.scaled_dot_product_attention, (X, X, X), {}),
    (FUNCTION, operator.getitem, (X, 0), {}),
    (FUNCTION, operator.mul, (X, X), {}),
    (FUNCTION, getattr, (X, "shape"), {}),
    (FUNCTION, torch.einsum, ("ij->i", X), {}),
    (FUNCTION, torch.rand, (2,), {}),
    (FUNCTION, torch.Tensor.mul, (X, X), {}),
    (FUNCTION, _aten.mul.Tensor, (X, X), {}),
    (FUNCTION, _aten.add, (X, X), {}),
    (FUNCTION, _own.twice.default, (X,), {}),
    (FUNCTION, _own.twice, (X,), {}),
    (METHOD, "reshape", (X, -1), {}),
    (METHOD, "size", (X,), {}),
    (METHOD, "float", (X,), {}),
    (METHOD, "masked_fill", (X, X, 0), {}),
]
IMPURE: list[Any] = [
    (FUNCTION, _aten.mul_.Tensor, (X, X), {}),
    (FUNCTION, _aten.mul_, (X, X), {}),
    (FUNCTION, _aten.add.out, (X, X), {"out": X}),
    (FUNCTION, torch.add, (X, 1), {"out": X}),
    (FUNCTION, torch.relu_, (X,), {}),
    (FUNCTION, F.relu, (X, True), {}),
    (FUNCTION, F.dropout, (X, 0.5, True, True), {}),
    (FUNCTION, F.leaky_relu, (X,), {"inplace": True}),
    (FUNCTION, F.embedding, (X, X), {"max_norm": 1.0}),
    (FUNCTION, F.embedding, (X, X, None, 1.0), {}),
    (FUNCTION, F.batch_norm, (X, X, X), {"training": True}),
    (FUNCTION, F.instance_norm, (X, X, X), {}),
    (FUNCTION, torch.batch_norm, (X, X, X, X, X, True, 0.1, 1e-5, False), {}),
    (FUNCTION, _aten.native_batch_norm.default, (X, X, X, X, X, True, 0.1, 1e-5), {}),
    (FUNCTION, _t._foreach_add_, ([X], 1), {}),
    (FUNCTION, operator.setitem, (X, 0, 1), {}),
    (FUNCTION, operator.iadd, (X, 1), {}),
    (FUNCTION, torch.Tensor.mul_, (X, X), {}),
    (FUNCTION, _own.write, (X,), {}),
    (FUNCTION, _own.write.default, (X,), {}),
    (FUNCTION, torch.manual_seed, (1,), {}),
    (FUNCTION, anything, (X,), {}),
    (FUNCTION, torch.ops.higher_order.cond, (X, None, None, []), {}),
    (FUNCTION, _t._C._set_grad_enabled, (False,), {}),
    (METHOD, "mul_", (X, 2), {}),
    (METHOD, "__setitem__", (X, 0, 1), {}),
    (METHOD, "backward", (X,), {}),
    (METHOD, "append", (X, 1), {}),
    (METHOD, "whatever", (X,), {}),
    (METHOD, "register_hook", (X, 0), {}),
    (MODULE, "fc", (X,), {}),
]
KEEPS_MODES: list[Any] = [
    *PURE,
    (FUNCTION, operator.setitem, (X, 0, 1), {}),
    (FUNCTION, torch.relu_, (X,), {}),
    (FUNCTION, _own.write, (X,), {}),
    (FUNCTION, torch.ops.higher_order.cond, (X, None, None, []), {}),
    (METHOD, "mul_", (X, 2), {}),
    (MODULE, "fc", (X,), {}),
]
CHANGES_MODES: list[Any] = [
    (FUNCTION, _t._C._set_grad_enabled, (False,), {}),
    (FUNCTION, torch.set_grad_enabled, (False,), {}),
    (FUNCTION, _t.amp.autocast_mode._enter_autocast, ("cpu", None, True, None), {}),
    (FUNCTION, _t.amp.autocast_mode._exit_autocast, (X,), {}),
    (FUNCTION, _t.autograd.grad_mode._enter_inference_mode, (True,), {}),
    (FUNCTION, torch.set_default_dtype, (torch.float64,), {}),
    (FUNCTION, anything, (X,), {}),
    (FUNCTION, _aten._print.default, ("text",), {}),
    (FUNCTION, torch.cuda.set_stream, (X,), {}),
    (METHOD, "__enter__", (X,), {}),
    (MODULE, "odd", (X,), {}),
]


def cases(table: list[Any]) -> pytest.MarkDecorator:
    names = [getattr(target, "__name__", str(target)) for _, target, *_ in table]
    return pytest.mark.parametrize("case", table, ids=[f"{i}-{name}" for i, name in enumerate(names)])


@cases(PURE)
def test_pure(case: Any) -> None:
    op, target, args, kwargs = case
    assert effects.is_pure(*node_of(op, target, *args, **kwargs))


@cases(IMPURE)
def test_impure(case: Any) -> None:
    op, target, args, kwargs = case
    assert not effects.is_pure(*node_of(op, target, *args, **kwargs))


@cases(KEEPS_MODES)
def test_keeps_modes(case: Any) -> None:
    op, target, args, kwargs = case
    assert effects.keeps_modes(*node_of(op, target, *args, **kwargs))


@cases(CHANGES_MODES)
def test_changes_modes(case: Any) -> None:
    op, target, args, kwargs = case
    assert not effects.keeps_modes(*node_of(op, target, *args, **kwargs))
