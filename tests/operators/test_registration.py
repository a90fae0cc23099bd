"""What PyTorch's own checker and compiler say about the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.arithmetic import BF16, FP32, FP64, Arithmetic
from tests.support.cases import ELEMENTWISE, LINEAR, draw_operands, signed
from tests.support.public import PUBLIC, Public, map_tensors, tensors_of
from tests.support.untyped import backward

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
@pytest.mark.parametrize("arithmetic", [FP32, BF16, FP64], ids=lambda a: a.name)
def test_fake_tensors_have_the_shapes_of_real_ones(
    function: Public, arithmetic: Arithmetic, rng: torch.Generator
) -> None:
    arguments = function.draw(rng, dtype=arithmetic.dtype)
    real = function.call(**arguments)
    with FakeTensorMode() as mode:
        fake = function.call(**map_tensors(arguments, mode.from_tensor))
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
        real.shape,
        real.dtype,
        real.device,
        real.stride(),
    )


@functions
def test_meta_tensors_through_the_public_functions(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    real = function.call(**arguments)
    result = function.call(**map_tensors(arguments, lambda t: t.to("meta")))
    assert result.is_meta
    assert (result.shape, result.dtype, result.stride()) == (real.shape, real.dtype, real.stride())


@functions
def test_compile_without_graph_breaks(function: Public, device: torch.device, rng: torch.Generator) -> None:
    """fullgraph=True, with gradients, static and dynamic shapes; the values and gradients are eager's."""
    torch.compiler.reset()
    for dynamic in (False, True):
        compiled = torch.compile(function.call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for rows in (9, 5):
            arguments = function.draw(rng, shape=(rows, 16, 24), device=device, tensor_scalar=True)
            results = []
            for call in (compiled, function.call):
                leaves = map_tensors(arguments, lambda t: t.clone().requires_grad_())
                output = call(**leaves)
                backward(output.square().sum())
                results.append([output.detach(), *(t.grad for t in tensors_of(leaves).values())])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**arguments), function.call(**arguments))


@functions
def test_dynamic_shapes_compile_once(function: Public, rng: torch.Generator) -> None:
    """Neither a new number of rows nor a new value of a 0-d scalar tensor may recompile for ever."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(function.call, fullgraph=True, dynamic=True, backend=counter)
    for step, rows in enumerate((3, 5, 7, 9, 11, 13)):
        arguments = function.draw(rng, shape=(rows, 16, 24))
        if function.scalar:
            arguments[function.scalar] = torch.tensor(0.5 + step)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**arguments), function.call(**arguments))
    assert counter.frame_count <= 2


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_sigmoid_scale_residual", "scale_batch_norm"])
def test_inductor(name: str, device: torch.device, rng: torch.Generator) -> None:
    torch.compiler.reset()
    function = next(each for each in PUBLIC if each.name == name)
    arguments = function.draw(rng, device=device)
    compiled = torch.compile(lambda given: function.call(**given) * 2 + 1, fullgraph=True)
    expected = function.call(**arguments) * 2 + 1
    torch.testing.assert_close(compiled(arguments), expected, rtol=1e-5, atol=1e-5)


@functions
def test_export(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)

    class Module(torch.nn.Module):
        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            return function.call(**given)

    program = torch.export.export(Module(), ({**arguments},))
    torch.testing.assert_close(program.module()({**arguments}), function.call(**arguments))
