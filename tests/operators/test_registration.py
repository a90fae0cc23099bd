"""What PyTorch's own checker and compiler say about the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

from tests.support.arithmetic import FP32
from tests.support.cases import ELEMENTWISE, LINEAR, draw_operands, signed
from tests.support.public import PUBLIC, Public

ops: Any = torch.ops.epigemm
functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op: Any, arguments: tuple[Any, ...]) -> None:
    results = torch.library.opcheck(op, arguments, test_utils=OPCHECKS)
    assert set(results) == set(OPCHECKS)
    assert all(result == "SUCCESS" for result in results.values()), results


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_opcheck_linear(name: str, requires_grad: bool, device: torch.device, rng: torch.Generator) -> None:
    for tensor_scalars in (False, True):
        operands = draw_operands(name, 8, FP32, device, rng, tensor_scalars=tensor_scalars)
        x, weight = signed((3, 8), rng).float().to(device), signed((8, 8), rng).float().to(device)
        for tensor in (x, weight, operands.bias, *operands.tensors):
            if tensor is not None:
                tensor.requires_grad_(requires_grad)
        opcheck(ops.linear, (name, x, weight, operands.bias, operands.tensors, operands.scalars, "default"))


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_opcheck_elementwise(
    name: str, requires_grad: bool, device: torch.device, rng: torch.Generator
) -> None:
    for tensor_scalars in (False, True):
        operands = draw_operands(name, 8, FP32, device, rng, tensor_scalars=tensor_scalars)
        x = signed((3, 8), rng).float().to(device)
        for tensor in (x, operands.bias, *operands.tensors):
            if tensor is not None:
                tensor.requires_grad_(requires_grad)
        opcheck(ops.elementwise, (name, x, operands.bias, operands.tensors, operands.scalars))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_opcheck_fold_batch_norm(requires_grad: bool, device: torch.device, rng: torch.Generator) -> None:
    vectors = [(signed((8,), rng).abs() + 0.5).float().to(device) for _ in range(6)]
    for vector in vectors:
        vector.requires_grad_(requires_grad)
    like = torch.empty(0, device=device)
    opcheck(ops.fold_batch_norm, (like, *vectors, 1e-5))
    opcheck(ops.fold_batch_norm, (like, None, *vectors[1:4], None, None, 1e-5))


@pytest.mark.parametrize("name", LINEAR)
def test_opcheck_out_twins(name: str, device: torch.device, rng: torch.Generator) -> None:
    operands = draw_operands(name, 8, FP32, device, rng)
    x, weight = signed((3, 8), rng).float().to(device), signed((8, 8), rng).float().to(device)
    out = torch.empty(3, 8, device=device)
    rest = (operands.bias, operands.tensors, operands.scalars)
    opcheck(ops.linear_out, (name, x, weight, *rest, "default", out))
    opcheck(ops.elementwise_out, (name, x, *rest, out))


@functions
def test_compiled_graphs_call_the_fused_operator(function: Public, rng: torch.Generator) -> None:
    """One node of ours in the graph: the call is not taken apart into torch's operators."""
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(function.call, fullgraph=True, backend=keep)(**function.draw(rng))
    targets = [
        str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"
    ]
    assert [target.startswith("epigemm.") for target in targets].count(True) == 1, targets
    others = [target for target in targets if not target.startswith("epigemm.")]
    assert all(target.startswith("<built-in method empty_like") for target in others), targets
