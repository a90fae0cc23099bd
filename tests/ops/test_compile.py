"""`torch.compile` and `torch.export`: one graph, the numbers, strides and gradients of the eager call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import epigemm
from epigemm import PerColumn
from tests.ops.bounds import assert_right
from tests.ops.op import COUNT, MATRIX, NUMBER, Op, results_of
from tests.ops.table import few, rows, some
from tests.support.compiling import recorded
from tests.support.untyped import backward

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@rows("compiled", some)
def test_compiled(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """As a module, without gradients and with them: `fullgraph`, and the same strides."""
    lead = (2, 5) if op.takes_any_lead else (10,)
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    arguments = op.draw(rng, lead, dtype=dtype, device=device, shares_rows=True)
    module, inputs = op.module(arguments)
    twin = copy.deepcopy(module)
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    if not op.of_kind(COUNT):
        with torch.no_grad():
            got, want = results_of(compiled(*inputs)), results_of(twin(*inputs))
        torch.testing.assert_close(got, want)
        assert [each.stride() for each in got] == [each.stride() for each in want]
        assert not any(each.requires_grad for each in got)
    leaves, others = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    for call, given in ((compiled, leaves), (twin, others)):
        results = [each for each in results_of(call(*given)) if each.requires_grad]
        if results:
            backward(sum((each.double().square().sum() for each in results), torch.zeros(())))
    parameters = zip(module.parameters(), twin.parameters(), strict=True)
    pairs = (*zip(leaves, others, strict=True), *parameters)
    largest = max((float(each.grad.abs().max()) for _, each in pairs if each.grad is not None), default=0.0)
    for mine, other in pairs:
        # In fp32 a number that cancels has the error of its terms, which may be as large as any gradient.
        bound = 1e-5 if mine.dtype is torch.float64 else 2**-24 * 64 * max(largest, 8.0)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=bound)
    for mine, other in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


@rows("compiled out", lambda op: op.takes_out and few(op))
def test_compiled_into_out(op: Op, device: torch.device, rng: torch.Generator) -> None:
    arguments = op.draw(rng, device=device)
    expected = op.call(**arguments)
    out = torch.full_like(expected, float("nan"))
    compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**arguments, out=out), expected)
    torch.testing.assert_close(out, expected)


@rows("dynamic", lambda op: op.function is not None and few(op))
def test_dynamic_rows_compile_once(op: Op, rng: torch.Generator) -> None:
    """A backend may be called twice: torch starts a trace again if a float of it, as BatchNorm's eps, is a constant."""
    compiled = torch.compile(op.call, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (3, 5, 64):
            arguments = op.draw(rng, (m,))
            assert_right(op, compiled(**arguments), arguments, torch.float32)


@rows("any rows", lambda op: op.function is not None and len(op.results) == 1 and few(op))
def test_two_graphs_for_all_rows(op: Op, rng: torch.Generator) -> None:
    """With torch's default the second M makes a graph for all others; 0 and 1 may have their own."""
    counter: Any = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.call, fullgraph=True, backend=counter)
    kept = op.draw(rng, tensor_numbers=True)
    for m, graphs in ((9, 1), (5, 2), (64, 2), (129, 2), (1, 3), (0, 4), (4, 4)):
        drawn = op.draw(rng, (m,), tensor_numbers=True)
        arguments = {**kept, **{name: drawn[name] for name in op.inputs()}}
        assert_right(op, compiled(**arguments), arguments, torch.float32)
        assert counter.frame_count <= graphs, m


@rows("native", lambda op: op.name[0] != "@" and op.takes_out and not op.of_kind(MATRIX) and some(op))
@pytest.mark.parametrize("tensor_numbers", [False, True])
def test_one_native_operator(op: Op, tensor_numbers: bool, rng: torch.Generator) -> None:
    """Of each type; a graph runs no Python of the package."""
    if tensor_numbers and not op.of_kind(NUMBER):
        return
    for dtype in (torch.float32, torch.bfloat16):
        arguments = op.draw(rng, dtype=dtype, tensor_numbers=tensor_numbers)
        graphs = recorded(op.call, **arguments)
        assert len(graphs.nodes) == 1 and graphs.is_native()


@rows("compiled numbers", lambda op: bool(op.of_kind(NUMBER)) and few(op))
def test_a_new_number_is_not_traced_again(op: Op, rng: torch.Generator) -> None:
    """A number that has changed becomes a symbol: one trace for the first, one for all others."""
    counter: Any = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.call, fullgraph=True, backend=counter)
    arguments = op.draw(rng)
    (name, *_) = op.of_kind(NUMBER)
    for number in (1.5, 2.5, -3.5, 4.5):
        given = {**arguments, name: number}
        assert_right(op, compiled(**given), given, torch.float32)
    assert counter.frame_count <= 2
    traced = counter.frame_count
    for number in (1.5, 2.5, -3.5):
        given = {**arguments, name: torch.tensor(number)}
        assert_right(op, compiled(**given), given, torch.float32)
    assert counter.frame_count == traced + 1, "a tensor is never a constant of the graph"


@pytest.mark.slow
@rows(
    "inductor",
    lambda op: op.name in ("linear_relu", "linear_residual", "@of_every_operand", "nn.LinearGLU-silu"),
)
def test_inductor(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """With operators before and behind it."""
    arguments = op.draw(rng, device=device)
    module, inputs = op.module(arguments)

    def call(*given: Tensor) -> list[Tensor]:
        return [each * 2 for each in results_of(module(given[0] + 0.0, *given[1:]))]

    compiled: Any = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=1e-4, atol=1e-4)


@rows("compiled vmap", lambda op: op.is_vmappable and op.function is not None and few(op))
def test_compiled_vmap(op: Op, rng: torch.Generator) -> None:
    arguments = op.draw(rng, (3,), dtype=torch.float64)
    stacked = torch.stack([arguments[op.input], 2 * arguments[op.input]])

    def call(x: Tensor) -> Any:
        return op.call(**{**arguments, op.input: x})

    mapped: Any = torch.vmap(call)
    compiled: Any = torch.compile(mapped, backend="eager")
    torch.testing.assert_close(
        results_of(compiled(stacked)), results_of(mapped(stacked)), rtol=1e-5, atol=1e-5
    )


@rows("exported", lambda op: op.is_exported and some(op))
def test_exported(op: Op, rng: torch.Generator) -> None:
    """A program that holds operators of epigemm, and computes without the module."""
    module, inputs = op.module(op.draw(rng))
    module.eval()
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs), strict=False)
        assert any("epigemm" in str(node.target) for node in program.graph.nodes)
        again = program.run_decompositions().module()
        for one in (program.module(), again):
            torch.testing.assert_close(
                results_of(one(*inputs)), results_of(module(*inputs)), rtol=1e-5, atol=1e-5
            )


@rows("export refused", lambda op: op.name.startswith("@") and few(op))
def test_programs_of_users_functions_are_refused(op: Op, rng: torch.Generator) -> None:
    """A saved program would need the Python function."""
    arguments = op.draw(rng)
    module, inputs = op.module(arguments)
    with pytest.raises(Exception, match=r"torch\.export"):
        torch.export.export(module, tuple(inputs), strict=False)
    with pytest.raises(NotImplementedError, match=r"got a call under torch\.jit\.trace"):
        torch.jit.trace(lambda x: op.call(**{**arguments, op.input: x}), (arguments[op.input],))  # type: ignore[no-untyped-call]


def without_derivative(acc: Tensor, divisor: PerColumn) -> Tensor:
    return torch.floor_divide(acc, divisor) + (acc // 0.75) * 0.5 + torch.heaviside(acc, divisor)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "epigemm"])
def test_steps_without_a_derivative(backend: str, rng: torch.Generator) -> None:
    """PyTorch's numbers in a graph, and PyTorch's error where a gradient is wanted."""
    made: Any = epigemm.epilogue(without_derivative)
    x, weight, divisor = (torch.randn(*shape, generator=rng) for shape in ((9, 24), (16, 24), (16,)))
    z = x @ weight.t()
    want = without_derivative(z, divisor)
    for call, given in ((made, (x, weight)), (made.elementwise, (z,))):
        compiled: Any = torch.compile(call, backend=backend, fullgraph=True)
        assert torch.equal(compiled(*given, divisor), want)
    recorded: Any = torch.compile(made, backend=backend)
    with pytest.raises(Exception, match=r"derivative for aten::(floor_divide|heaviside) is not impl"):
        backward(recorded(x.requires_grad_(), weight, divisor).sum())
