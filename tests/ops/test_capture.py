"""CUDA graphs: a captured call computes from what its tensors hold at each replay. On a GPU alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.bounds import assert_right
from tests.ops.op import COUNT, Op, results_of, tensors_of
from tests.ops.table import rows
from tests.support.untyped import torch as untyped

pytestmark = pytest.mark.gpu


def replayed(graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> None:
    for each in results:
        each.zero_()
    graph.replay()
    torch.cuda.synchronize()


@rows("capture", lambda op: not op.of_kind(COUNT))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_capture(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """After a call has linked its kernels; every tensor changes between replays, numbers in tensors too."""
    arguments = op.draw(rng, (64,), 72, 136, dtype=dtype, device="cuda", tensor_numbers=True)
    side = untyped.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op.call(**arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(op.call(**arguments))
    for _ in range(2):
        replayed(graph, results)
        want = results_of(op.call(**arguments))
        for one, other in zip(results, want, strict=True):
            torch.testing.assert_close(one, other)
        fresh = op.draw(rng, (64,), 72, 136, dtype=dtype, device="cuda", tensor_numbers=True)
        for name, value in tensors_of(arguments).items():
            value.copy_(fresh[name])
    replayed(graph, results)
    if dtype is torch.bfloat16:
        assert_right(op, tuple(results), arguments, dtype)


@rows("captured gradients", lambda op: not op.of_kind(COUNT))
def test_capture_of_gradients(op: Op, rng: torch.Generator) -> None:
    """A forward and a backward pass in one graph."""
    arguments = op.draw(rng, (64,), 72, 136, dtype=torch.bfloat16, device="cuda", tensor_numbers=True)
    leaves = [arguments[name].requires_grad_() for name in op.leaves(arguments)]

    def step() -> list[Tensor]:
        results = [each for each in results_of(op.call(**arguments)) if each.requires_grad]
        return list(torch.autograd.grad(results, leaves, [torch.ones_like(each) for each in results]))

    side = untyped.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    replayed(graph, found)
    for one, other in zip(found, step(), strict=True):
        torch.testing.assert_close(one, other)
