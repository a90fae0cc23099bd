"""Which graphs can be replayed as CUDA graphs, told by what their operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from epigemm.fusion.replayable import NUMBER, RANDOM, RECORDED, device_of

CPU = torch.device("cpu")


def found(function: Callable[..., Any], *args: Any, grad: bool = False) -> Any:
    """What is said of the first graph."""
    answers: list[Any] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        answers.append(device_of(graph_module.graph))
        return graph_module.forward

    with torch.set_grad_enabled(grad):
        torch.compile(function, backend=backend)(*args)
    return answers[0]


def attention(x: Tensor) -> Tensor:
    y = x.view(1, 1, *x.shape)
    return F.scaled_dot_product_attention(y, y, y)


def autocast_within(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


def constants(x: Tensor) -> Tensor:
    return x * torch.tensor(2.0) + torch.arange(8, device=x.device) + torch.zeros(8)


def writes_its_own(x: Tensor) -> Tensor:
    y = x + 1
    y[0] = 0
    y.relu_().view(-1)[3:].mul_(2)
    return y.masked_fill_(y > 3, 1.0)


def no_grad_within(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x + 1
    return y * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, False) + 1,
        lambda x: F.rrelu(x, training=False),
        lambda x: x[torch.zeros(3, dtype=torch.int64)],
        lambda x: x.split(4, -1)[1] + x.chunk(2, -1)[0],
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8)),
        lambda x: torch.where(x > 0, x, 0.0).topk(3).indices,
        lambda x: x.t(),
        attention,
        autocast_within,
        constants,
        writes_its_own,
        no_grad_within,
    ],
)
def test_what_can_be_replayed(function: Callable[..., Any]) -> None:
    assert found(function, torch.rand(8, 8)) == CPU
    assert not torch.is_autocast_enabled("cpu")


def add_in_place(x: Tensor) -> Tensor:
    return x.view(-1).add_(1)


def put_many(x: Tensor) -> Tensor:
    return torch.index_put(x, (x > 2,), torch.zeros(0))


def vmapped(x: Tensor) -> Tensor:
    found: Tensor = torch.vmap(lambda row: row * 2)(x)
    return found


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: F.dropout(x, 0.5, True), RANDOM),
        (lambda x: F.rrelu(x, training=True), RANDOM),
        (lambda x: torch.randn(8) + x, RANDOM),
        (lambda x: torch.bernoulli(x), RANDOM),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), RANDOM),
        (add_in_place, "writes to memory that is there before the call"),
        (lambda x: torch.add(x, 1, out=x), "writes to memory"),
        (put_many, "has the host wait for a number"),
        (vmapped, "a transform of torch.func"),
    ],
)
def test_what_cannot(function: Callable[..., Any], reason: str) -> None:
    answer = found(function, torch.rand(8, 8))
    assert isinstance(answer, str) and reason in answer


def test_statistics_are_written() -> None:
    mean, variance = torch.zeros(8), torch.ones(8)
    answer = found(lambda x: F.batch_norm(x, mean, variance, training=True), torch.rand(4, 8))
    assert "writes to memory" in answer


def test_derivatives() -> None:
    x = torch.rand(8, 8, requires_grad=True)
    assert found(lambda x: x * 2, x, grad=True) == RECORDED
    assert found(lambda x: x.detach() * 2, x, grad=True) == RECORDED
    assert found(lambda x: x * 2, torch.rand(8, 8), grad=True) == CPU
    assert found(lambda x: x * 2, x) == CPU


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((torch.rand(8), torch.rand((), device="meta")), "its inputs are on several devices: cpu, meta"),
        ((3,), "it has no tensors among its inputs"),
    ],
)
def test_devices(args: tuple[Any, ...], reason: str) -> None:
    def function(*args: Any) -> Any:
        return [torch.ones(2) + 1, *(each * 2 for each in args)]

    assert found(function, *args) == reason


def graph_on(device: str, *calls: tuple[Any, ...]) -> fx.Graph:
    """x on a device without data; each call takes the result before it, or nothing where its arguments lack X."""
    graph, mode = fx.Graph(), FakeTensorMode()
    node = graph.placeholder("x")
    with mode:
        value = node.meta["example_value"] = torch.empty(8, device=device)
        for function, *args in calls:
            before = node
            node = graph.call_function(function, tuple(before if arg is X else arg for arg in args))
            if function is torch.tensor:
                value = torch.empty(2, device=device)
            else:
                value = function(*(value if arg is X else arg for arg in args))
            node.meta["example_value"] = value
    graph.output((node,))
    return graph


X = object()


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([(Tensor.to, X, "cpu"), (torch.add, X, 1)], "copies between cuda:0 and cpu"),
        ([(torch.ones, 8), (Tensor.to, X, "cuda:0")], "copies between cuda:0 and cpu"),
        ([(torch.ones, ()), (Tensor.to, X, "cuda:0")], "copies between cuda:0 and cpu"),
        ([(torch.tensor, [1.0, 2.0]), (torch.add, X, 1)], "copies numbers of the host's"),
        ([(torch.ones, ()), (torch.sqrt, X), (torch.mul, X, 2)], ""),
        ([(torch.add, X, 1), (torch.mul, X, X)], ""),
    ],
)
def test_copies_between_devices(calls: list[tuple[Any, ...]], reason: str) -> None:
    answer = device_of(graph_on("cuda:0", *calls))
    assert str(answer).endswith(reason) if reason else answer == torch.device("cuda:0")


def test_a_float_that_changes() -> None:
    """The first call's is a constant of its graph. The second graph would read it from a tensor on the host."""
    answers: list[Any] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        answers.append(device_of(graph_module.graph))
        return graph_module.forward

    with torch.no_grad():
        compiled = torch.compile(lambda x, scale: x.sigmoid() * scale, backend=backend)
        for scale in (7.5, 5.0):
            compiled(torch.rand(4, 8), scale)
    assert answers == [CPU, NUMBER]


def test_sizes_that_change() -> None:
    x = torch.rand(8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    assert found(lambda x: x.reshape(-1, 4) * x.shape[0] + 1, x) == CPU
