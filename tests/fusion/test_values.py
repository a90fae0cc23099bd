"""What is known of the tensors of a graph: layouts and shared memory, for all sizes or for none."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from epigemm.fusion import values

x = torch.randn(2, 3, 4)


@pytest.fixture
def symbolic() -> Tensor:
    """`[s, 4]` for any s."""
    mode: Any = FakeTensorMode(shape_env=ShapeEnv())
    sizes: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    found: Tensor = mode.from_tensor(torch.randn(5, 4), symbolic_context=sizes)
    return found


def test_contiguous() -> None:
    for tensor in (x, x[:1], x[:, :1].contiguous(), torch.ones(()), x[0], x.view(6, 4)):
        assert values.is_contiguous(tensor)
    for tensor in (
        x.transpose(0, 1),
        x[:, ::2],
        x[..., :2],
        x[0].expand(2, 3, 4),
        x.mT,
    ):
        assert not values.is_contiguous(tensor)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_order_of_the_axes(order: tuple[int, ...]) -> None:
    moved = x.permute(order)
    found = values.order_of(moved)
    assert found is not None and values.is_contiguous(moved.permute(found))
    assert values.in_order(moved.shape, found) == [2, 3, 4]


def test_tensors_with_gaps_have_no_order() -> None:
    for tensor in (x[:, ::2], x[..., :2], x[0].expand(2, 3, 4)):
        assert values.order_of(tensor) is None


def test_layouts() -> None:
    assert values.same_layout(x, torch.empty_like(x))
    assert values.same_layout(
        x[:1], x.as_strided((1, 3, 4), (99, 4, 1))
    )  # the stride of an axis of size 1 says nothing
    assert not values.same_layout(x.mT, x.mT.contiguous())
    assert not values.same_layout(x, x[:1]) and not values.same_layout(x, x[0])


def test_memory() -> None:
    assert values.is_same_memory(x, x.view(6, 4)) and values.is_same_memory(x, x.permute(2, 0, 1))
    for other in (x.clone(), x[:1], x[1:], x[:, ::2], x.view(torch.int32)):
        assert not values.is_same_memory(x, other)
    assert values.storage_of(x) == values.storage_of(x[1:]) != values.storage_of(x.clone())


def test_what_holds_for_all_sizes(symbolic: Tensor) -> None:
    rows = symbolic.shape[0]
    assert values.known(rows == rows) and values.known(rows * 4 == 4 * rows)
    assert not values.known(rows == 5), "it is 5 in this call alone"
    assert values.same_sizes(symbolic.shape, (rows, 4))
    assert not values.same_sizes(symbolic.shape, (5, 4)) and not values.same_sizes(symbolic.shape, (rows,))
    assert values.is_contiguous(symbolic) and not values.is_contiguous(symbolic.t())
    assert values.order_of(symbolic.t()) == (1, 0)
    assert values.hint(rows) == 5 and values.hint(7) == 7


def test_nodes_without_a_plain_tensor() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for value, found in ((x, x), (3, None), (x.to_sparse(), None), (None, None)):
        node.meta["example_value"] = value
        assert values.tensor_of(node) is found
    assert values.tensor_of("x") is None
    node.meta["example_value"] = [x, 3, x[0]]
    tensors = values.tensors_of(node)
    assert len(tensors) == 2 and tensors[0] is x
