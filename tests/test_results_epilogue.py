"""Functions with several results: accuracy, equal results, and what is rounded on the way. Rows: tests/ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import epigemm
from epigemm import PerColumn
from epigemm.epilogues.tracer.results import SUM, structured
from tests.support.moments import assert_close
from tests.support.results import draw, late, squares, statistics, wanted
from tests.support.thorough import in_turn

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def test_var_mean_is_as_accurate_as_torchs(device: torch.device, rng: torch.Generator) -> None:
    """A mean of 1e4, a deviation of 1: the matrix is rounded once. On a CPU the bits are those of torch's var_mean.

    On a GPU torch follows the mean in fp32; where epigemm's kernels compute the variance, they are more accurate.
    """
    given = draw(statistics, rng, torch.float32, device, (4096,))
    given.operands[:] = [torch.full((24,), 1e4, device=device), torch.ones(24, device=device)]
    z, (variance, mean), _ = statistics(given.x, given.weight, *given.operands)
    if device.type == "cpu":
        own = torch.var_mean(z, 0, correction=0)
        assert torch.equal(variance, own[0]) and torch.equal(mean, own[1])
    else:
        assert_close(z, mean, variance)
    exact = torch.var_mean(z.double(), 0, correction=0)
    whole = torch.var_mean(given.product + 1e4, 0, correction=0)[0]
    # fp32 has steps of 2^-10 near 1e4: roundings deviate by 2^-10 / sqrt(12). The variance changes by twice the mean of
    # their products with the deviations of z, of random signs: by 2 * 2^-10 / sqrt(12) / sqrt(4096) = 9e-6, or some of
    # these in one of 24 columns.
    assert float(((exact[0] - whole) / whole).abs().max()) < 1e-4
    if device.type == "cpu":  # there torch adds up in fp64
        assert float(((variance.double() - exact[0]) / exact[0]).abs().max()) < 2e-6
        assert float(((mean.double() - exact[1]) / exact[1]).abs().max()) < 2e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reductions_of_16_bits_are_in_fp32(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """Sums that 16 bits do not hold, and squares beyond fp16's range."""
    given = draw(squares, rng, dtype, device, (5000,))
    scaled = given.x * 128
    got = squares(scaled, given.weight)
    want = (scaled.double() @ given.weight.double().t()).square().sum(0)
    assert got.dtype == torch.float32 and bool(got.isfinite().all())
    assert float(((got.double() - want) / want).abs().max()) < 2 * torch.finfo(dtype).eps
    ones = torch.ones(5000, 24, device=device, dtype=dtype)
    assert torch.equal(
        late.elementwise(ones, ones[0] - 1)[1].isfinite(), torch.ones(24, device=device).bool()
    )
    assert torch.equal(squares.elementwise(ones), torch.full((24,), 5000.0, device=device))


# --- equal results, and what is rounded on the way --------------------------------------------------------------------


def _twice(z: Tensor) -> Any:
    s = z.sum(0)
    return z, z, s, s


SAME: dict[str, Any] = {
    "reductions": lambda z: (z.amax(-1), z.amax(dim=1), z.amax(1), z.amax(1, keepdim=True)),
    "sums": lambda z: (z.sum(0), z.sum(0, keepdim=True), z.mean(0), z.mean(0)),
    "variances": lambda z: (z.var(0), *torch.var_mean(z, 0), z.var(0), *torch.var_mean(z, 0, correction=0), z.mean(0)),
    "matrices": lambda z: (z, z.clone(), z.detach(), z * 1.0, torch.tanh(z), torch.tanh(z)),
    "fp32": lambda z: (z, z.float(), z.float().clone(), (z * 2.0).float(), (z * 2.0).float()),
    "the same tensor": _twice,
    "constants": lambda z: (torch.zeros_like(z), torch.zeros_like(z), torch.full_like(z, 0.0)),
    "nested": lambda z: [z, (z.clone(), [z])],
}  # fmt: skip


WAYS = [(way, name) for name in SAME for way in ("linear", "elementwise", "recorded", "aot_eager", "vmap")]


@pytest.mark.every(3)
@pytest.mark.parametrize(("call", "dtype"), in_turn(WAYS, [*DTYPES.values()]), ids=str)
def test_equal_results_are_tensors_of_their_own(
    call: tuple[str, str], dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """As in PyTorch: one tensor only where the function returns one twice; writing one leaves the others alone."""
    way, name = call
    same = SAME[name]

    @epigemm.epilogue
    def function(acc: Tensor, bias: PerColumn) -> Any:
        return same(acc + bias)

    given = draw(function, rng, dtype, device, (2, 5))
    x, weight, (bias,) = given.x, given.weight, given.operands
    want, structure = structured(same(torch.randn(10, 24, dtype=torch.float64)))
    if way == "linear":
        got = function(x, weight, bias)
    elif way == "elementwise":
        got = function.elementwise(torch.randn(2, 5, 24, generator=rng).to(device, dtype), bias)
    elif way == "recorded":
        got = function(x.requires_grad_(), weight, bias)
    elif way == "vmap":
        got = torch.vmap(lambda each: function(each, weight, bias))(x)
    else:
        torch.compiler.reset()
        compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
        got = compiled(x, weight, bias)
    leaves, found = structured(got)
    assert found == structure and len(leaves) == len(want)
    leaves = [each.detach() for each in leaves]
    before = [each.clone() for each in leaves]
    for number, each in enumerate(leaves):
        each.fill_(float(number))
        for other in range(number + 1, len(leaves)):
            assert torch.equal(leaves[other], before[other]), (number, other)


LARGE = 1e4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize(
    "rest",
    [
        lambda v, c: (v - c, v.var(0)),
        lambda v, c: (v, v - c),
        lambda v, c: (v - c, torch.tanh(v - c), (v - c).sum(1)),
        lambda v, c: ((v - c).sum(0), (v - c).mean(1)),
        lambda v, c: ((v - c).float(), v.float()),
        lambda v, c: (v.float(), v.sum(0), v - c),
        lambda v, c: (v, v.float(), (v.float() - c).amax(1)),
    ],
)
def test_only_the_product_is_rounded_on_the_way(
    rest: Any, is_recorded: bool, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """Results that cancel a large bias are off by a rounding of the product, not by one of the sum with the bias."""

    @epigemm.epilogue
    def function(acc: Tensor, bias: PerColumn, c: PerColumn) -> Any:
        return rest(acc + bias, c)

    given = draw(function, rng, dtype, device)
    given.operands[:] = [torch.full((24,), LARGE, device=device, dtype=dtype)] * 2
    want = wanted(function, given.product, given.operands)
    got = tree_leaves(function(given.x.requires_grad_(is_recorded), given.weight, *given.operands))
    size = float(given.product.abs().max())
    fp32 = 2.0**-20 * LARGE  # of the steps, and of sums of 37 numbers
    for result, one, other in zip(function.results, got, want, strict=True):
        count = 37 if result.kind == SUM else 1
        of_it = torch.finfo(one.dtype).eps * other.abs()
        bound = count * (torch.finfo(dtype).eps * (size + size**2) + fp32) + of_it
        assert bool(((one.double() - other).abs() <= bound).all()), (
            result,
            (one.double() - other).abs().max(),
        )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("way", ["eager", "recorded", "aot_eager"])
def test_a_mean_is_never_var_means(way: str, axis: int, device: torch.device) -> None:
    """Unless the function asks for it: that of an infinity is NaN. In any order of the results."""
    inf = torch.inf
    z = torch.tensor([[inf, 1.0, -inf], [1.0, 2.0, 5.0], [3.0, 2.0, 7.0]], device=device)
    orders: list[Any] = [
        lambda acc: (acc.var(axis), acc.mean(axis)),
        lambda acc: (acc.mean(axis), acc.var(axis)),
        lambda acc: (*torch.var_mean(acc, axis), acc.mean(axis)),
        lambda acc: (torch.var_mean(acc, axis)[1], acc.mean(axis), acc.var(axis, correction=0)),
        lambda acc: torch.var_mean(acc, axis)[1:],
    ]
    for order in orders:
        made = epigemm.epilogue(order)
        torch._dynamo.reset()
        call = torch.compile(made.elementwise, backend=way) if way == "aot_eager" else made.elementwise
        got = call(z.clone().requires_grad_(way == "recorded"))
        for result, one, other in zip(made.results, got, order(z), strict=True):
            if result.comes_with_var and z.is_cuda:
                continue
            torch.testing.assert_close(one, other, equal_nan=True)


def test_gradients_of_ties(device: torch.device) -> None:
    """As torch's: shared evenly."""
    z = torch.tensor([[1.0, 3.0], [1.0, 2.0], [1.0, 3.0]], device=device, requires_grad=True)
    epigemm.epilogue(lambda acc: (acc, acc.amax(0))).elementwise(z)[1].sum().backward()
    assert z.grad is not None
    third = pytest.approx(1 / 3)
    assert z.grad.tolist() == [[third, 0.5], [third, 0.0], [third, 0.5]]
