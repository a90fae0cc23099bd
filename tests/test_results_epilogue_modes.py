"""Functions with several results under autograd, transforms, compilers, autocast and the batch-invariant mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import epigemm
from epigemm import PerColumn, PerRow, ResultsEpilogue
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.tracing.results import AMAX, AMIN, Result
from tests.support.invariance import assert_each_row_alone, bits
from tests.support.results import (
    FUNCTIONS,
    NAMES,
    assert_results,
    draw,
    every_reduction,
    gelu_and_product,
    in_fp32,
    late,
    of_every_operand,
    squares,
    statistics,
    wanted,
)

of_each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)


def differentiable(function: ResultsEpilogue) -> list[int]:
    """The results that are in fp64 beside fp64: numbers of fp32 are no functions of which differences tell."""
    return [number for number, each in enumerate(function.results) if not each.is_fp32]


def leaves_of(got: Any, numbers: list[int]) -> tuple[Tensor, ...]:
    """Of the results those that have a gradient."""
    every = tree_leaves(got)
    return tuple(every[number] for number in numbers if every[number].requires_grad)


@pytest.mark.parametrize("form", ["linear", "elementwise"])
@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
@of_each_function
def test_gradients(
    function: ResultsEpilogue, lead: tuple[int, ...], form: str, device: torch.device, rng: torch.Generator
) -> None:
    """Of every tensor, in fp64, first and second."""
    given = draw(function, rng, torch.float64, device, lead, 4, 3)
    if form == "elementwise":
        given.x = torch.randn(*lead, 4, generator=rng, dtype=torch.float64).to(device)
    numbers = differentiable(function)
    tensors = (
        given.leaves() if form == "linear" else [each for each in given.leaves() if each is not given.weight]
    )

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        values = iter(leaves)
        x = next(values)
        inputs = (x, next(values)) if form == "linear" else (x,)
        operands = [next(values) if isinstance(each, Tensor) else each for each in given.operands]
        return leaves_of(
            (function if form == "linear" else function.elementwise)(*inputs, *operands), numbers
        )

    if call(*tensors):
        assert torch.autograd.gradcheck(call, tensors)
        assert torch.autograd.gradgradcheck(call, tensors, atol=1e-4)


def test_gradients_of_ties(device: torch.device) -> None:
    """As torch's: shared evenly."""
    z = torch.tensor([[1.0, 3.0], [1.0, 2.0], [1.0, 3.0]], device=device, requires_grad=True)
    bias = torch.zeros(2, device=device)
    every_reduction.elementwise(z, bias)[4].sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [
        [pytest.approx(1 / 3), 0.5],
        [pytest.approx(1 / 3), 0.0],
        [pytest.approx(1 / 3), 0.5],
    ]


def are_decided(result: Result, matrix: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """1 where rounding the matrix that a result reduces leaves an element its gradient, else 0: of extremes alone.

    An extreme has the gradient of the element that it is. Two elements that differ by less than two roundings of each
    may become equal, and share it, or change places.
    """
    if result.kind not in (AMAX, AMIN):
        return torch.ones(shape, device=matrix.device)
    largest = (matrix if result.kind == AMAX else -matrix).topk(2, result.axis).values
    first, second = largest.unbind(result.axis)
    decided = first - second > 2 * torch.finfo(dtype).eps * first.abs()
    assert bool(decided.any())
    return decided.float().reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function", [gelu_and_product, statistics, in_fp32, late], ids=lambda f: f.traced.name
)
def test_gradients_are_those_of_plain_operators(
    function: ResultsEpilogue, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    given = draw(function, rng, dtype, device)
    leaves = given.leaves()
    got = tree_leaves(function(given.x, given.weight, *given.operands))
    wide = [each.detach().double().requires_grad_() for each in leaves]
    want = wanted(function, wide[0] @ wide[1].t(), wide[2:])
    # Extremes of these functions are of their first result, but for a constant.
    weights = [
        torch.randn(each.shape, generator=rng).to(device)
        * are_decided(result, want[0].detach(), dtype, each.shape)
        for each, result in zip(got, function.results, strict=True)
    ]
    sum((each * weight).sum() for each, weight in zip(got, weights, strict=True)).backward()
    sum((each * weight).sum() for each, weight in zip(want, weights, strict=True)).backward()  # type: ignore[union-attr]
    # Four roundings to 16 bits, each by eps / 2 at most: a result's gradient, the matrix it is computed from, the
    # gradient of the product, the leaf's. In fp32 also sums of up to 40 products.
    most = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    for mine, other in zip(leaves, wide, strict=True):
        assert mine.grad is not None and other.grad is not None and mine.grad.dtype == dtype
        error = (mine.grad.double() - other.grad).norm() / other.grad.norm()
        assert float(error) < most


def test_what_ends_has_no_gradient(rng: torch.Generator) -> None:
    @epigemm.epilogue
    def ended(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
        z = acc + bias
        return z * 2, z.detach() + 1, bias.expand_as(acc) * 1.0, z.detach().sum(0), z.sum(1)

    x, weight, bias = (torch.ones(size, requires_grad=True) for size in ((3, 4), (2, 4), (2,)))
    assert [each.requires_grad for each in ended(x, weight, bias)] == [True, False, True, False, True]
    with torch.no_grad():
        assert not any(each.requires_grad for each in ended(x, weight, bias))
    assert [each.requires_grad for each in ended(x, weight.detach(), bias.detach())] == [
        True,
        *[False] * 3,
        True,
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "function", [statistics, in_fp32, of_every_operand, squares], ids=lambda f: f.traced.name
)
def test_compile(
    function: ResultsEpilogue, recorded: bool, backend: str, device: torch.device, rng: torch.Generator
) -> None:
    given = draw(function, rng, torch.float32, device, (2, 5))
    x = given.x.requires_grad_(recorded)

    def call(x: Tensor, *operands: Any) -> Any:
        return function(x * 1.0, given.weight, *operands), function.elementwise(x[..., :24] + 1.0, *operands)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    got, want = tree_leaves(compiled(x, *given.operands)), tree_leaves(call(x, *given.operands))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if recorded:
        one, other = (
            torch.autograd.grad(sum(each.square().sum() for each in of if each.requires_grad), x)[0]
            for of in (got, want)
        )
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_compiled_sizes_and_dtypes(device: torch.device, rng: torch.Generator) -> None:
    """Other rows, and x of 16 bits, by one compiled function."""
    torch._dynamo.reset()
    compiled = torch.compile(in_fp32, fullgraph=True, backend="aot_eager", dynamic=True)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (5, 9, 12):
            given = draw(in_fp32, rng, dtype, device, (rows,))
            want = wanted(in_fp32, given.product, given.operands)
            assert_results(in_fp32, compiled(given.x, given.weight, *given.operands), want, dtype, (rows, 24))


def test_vmap(device: torch.device, rng: torch.Generator) -> None:
    given = draw(statistics, rng, torch.float32, device, (4, 6))
    got = torch.vmap(lambda x: statistics(x, given.weight, *given.operands))(given.x)
    each = [statistics(x, given.weight, *given.operands) for x in given.x]
    for number, found in enumerate(tree_leaves(got)):
        want = torch.stack([tree_leaves(one)[number] for one in each])
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_functional_derivatives(rng: torch.Generator) -> None:
    given = draw(statistics, rng, torch.float64, lead=(6,))

    def loss(x: Tensor, call: Callable[..., Any]) -> Tensor:
        z, (variance, mean), rest = call(x)
        total: Tensor = z.square().sum() + (variance * mean).sum() + sum(each.sum() for each in rest)
        return total

    def plain(x: Tensor) -> Any:
        return vars(statistics)["__wrapped__"](x @ given.weight.t(), *given.operands)

    one, other = (
        torch.func.jvp(call, (given.x,), (torch.ones_like(given.x),))
        for call in (lambda x: statistics(x, given.weight, *given.operands), plain)
    )
    torch.testing.assert_close(one, other)
    got = torch.func.grad(lambda x: loss(x, lambda x: statistics(x, given.weight, *given.operands)))(given.x)
    torch.testing.assert_close(got, torch.func.grad(lambda x: loss(x, plain))(given.x))


@pytest.mark.parametrize("function", [statistics, in_fp32, squares], ids=lambda f: f.traced.name)
def test_autocast(function: ResultsEpilogue, device: torch.device, rng: torch.Generator) -> None:
    given = draw(function, rng, torch.float32, device)
    given.operands = [each.bfloat16() if isinstance(each, Tensor) else each for each in given.operands]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = function(given.x, given.weight, *given.operands)
    want = wanted(function, given.product, given.operands)
    assert_results(function, got, want, torch.bfloat16, (37, 24))


@of_each_function
def test_inference_mode_and_meta(function: ResultsEpilogue, rng: torch.Generator) -> None:
    given = draw(function, rng, torch.bfloat16)
    want = tree_leaves(function(given.x, given.weight, *given.operands))
    with torch.inference_mode():
        got = tree_leaves(function(given.x, given.weight, *given.operands))
    assert all(torch.equal(a, b) and a.is_inference() for a, b in zip(got, want, strict=True))
    on_meta = [
        each.to("meta") if isinstance(each, Tensor) else each
        for each in (given.x, given.weight, *given.operands)
    ]
    shapes = [(each.shape, each.dtype) for each in tree_leaves(function(*on_meta))]
    assert shapes == [(each.shape, each.dtype) for each in want]


# --- batch invariance -------------------------------------------------------------------------------------------------


@epigemm.epilogue
def by_rows(acc: Tensor, bias: PerColumn, gain: PerRow) -> tuple[Tensor, ...]:
    z = acc + bias
    y = torch.nn.functional.silu(z) * gain
    return y, z, y.sum(1), z.mean(1, keepdim=True), *torch.var_mean(y, 1), z.amax(1), (y * z).amin(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["linear", "elementwise"])
def test_batch_invariance(form: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    if dtype == torch.float64 and device.type == "cuda":
        return  # refused there
    given = draw(by_rows, rng, dtype, device, (50,), 203, 203)
    bias, gain = given.operands
    x = torch.cat((given.x, gain.unsqueeze(1)), 1)

    def call(x: Tensor) -> list[Tensor]:
        x, gain = x[:, :-1].contiguous(), x[:, -1].contiguous()
        given_x = (x, given.weight) if form == "linear" else (x,)
        return tree_leaves((by_rows if form == "linear" else by_rows.elementwise)(*given_x, bias, gain))

    plain = call(x)
    with epigemm.batch_invariant():
        for number, each in enumerate(plain):
            assert_each_row_alone(lambda x, number=number: call(x)[number], x, [0, 1, 7, 49])  # type: ignore[misc]
            torch.testing.assert_close(call(x)[number], each, rtol=1e-2, atol=1e-2)
        together = [bits(each) for each in call(x)]
        for one, other in zip(call(x[13:]), together, strict=True):
            assert torch.equal(bits(one), other[13:])


def test_sums_over_rows_are_no_rows_own(rng: torch.Generator) -> None:
    for function in (squares, statistics):
        given = draw(function, rng, torch.float32)
        with epigemm.batch_invariant():
            with pytest.raises(
                RuntimeError, match=f"batch_invariant: got a call of {function.traced.name}, with a"
            ):
                function(given.x, given.weight, *given.operands)
            with pytest.raises(RuntimeError, match="accepted are reductions of each row"):
                function.elementwise(given.product, *[each.double() for each in given.operands])
            with pytest.raises(RuntimeError, match="accepted are reductions of each row"):
                epigemm.explain(function, given.x, given.weight, *given.operands)


def test_a_batch_invariant_call_has_its_values(device: torch.device, rng: torch.Generator) -> None:
    for function in (in_fp32, gelu_and_product):
        given = draw(function, rng, torch.float32, device, (3, 7))
        with epigemm.batch_invariant():
            got = function(given.x, given.weight, *given.operands)
        assert_results(
            function, got, wanted(function, given.product, given.operands), torch.float32, (3, 7, 24)
        )


def test_per_row_operands_of_a_batch_invariant_call(rng: torch.Generator) -> None:
    """Operands of every kind, of leading axes."""

    @epigemm.epilogue
    def without_columns(
        acc: Tensor, bias: PerColumn, row: PerRow, other: epigemm.Matrix, s: epigemm.Scalar
    ) -> Any:
        z = acc + bias
        return torch.sigmoid(z) * row, z * other + s

    given = draw(without_columns, rng, torch.float64, lead=(2, 3))
    assert [kind == SCALAR or KINDS[kind].by_row for kind in without_columns.traced.kinds] == [
        False,
        True,
        True,
        True,
    ]
    with epigemm.batch_invariant():
        got = without_columns(given.x, given.weight, *given.operands)
    assert_results(
        without_columns,
        got,
        wanted(without_columns, given.product, given.operands),
        torch.float64,
        (2, 3, 24),
    )


def test_programs_that_are_saved_are_refused(rng: torch.Generator) -> None:
    given = draw(squares, rng, torch.float32)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Any:
            return squares(x, weight)

    with pytest.raises(Exception, match=r"squares: got a call under torch\.export"):
        torch.export.export(Model(), (given.x, given.weight), strict=False)
    with pytest.raises(NotImplementedError, match=r"squares: got a call under torch\.jit\.trace"):
        torch.jit.trace(lambda x: squares(x, given.weight), (given.x,))  # type: ignore[no-untyped-call]
