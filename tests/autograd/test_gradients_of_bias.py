"""The gradient of a bias behind a product: on a GPU the derivative's kernel sums it. Others: ops/test_autograd.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.arguments.calls import ElementwiseCall
from epigemm.autograd import gradients
from epigemm.calls import derivative, elementwise_kernels, entry
from epigemm.epilogues.library import BIAS_RELU
from epigemm.epilogues.registry import EPILOGUES, compute_dtype, typed
from epigemm.planner.reasons import Reason
from tests.support.arithmetic import STORAGE
from tests.support.cases import ELEMENTWISE, draw_operands, poisoned, signed
from tests.support.moments import poison_free_memory

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = [(1, 8), (1, 4096), (5, 33), (33, 264), (2, 3, 40), (300, 264), (4097, 72), (4096, 256), (0, 8)]
ARITHMETICS = {arithmetic.dtype: arithmetic for arithmetic in STORAGE}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_sums(sums: Tensor, summed: Tensor) -> None:
    """Within the roundings of a sum whose longest chain has 600 additions, and one rounding to the result's type."""
    wide = torch.finfo(compute_dtype(summed.dtype)).eps
    exact = summed.double().reshape(-1, summed.shape[-1])
    bound = 600 * wide * exact.abs().sum(0) + torch.finfo(summed.dtype).eps * exact.sum(0).abs()
    bound += torch.finfo(summed.dtype).tiny
    assert sums.dtype is summed.dtype and sums.shape == summed.shape[-1:]
    assert bool(((sums.double() - exact.sum(0)).abs() <= bound).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ELEMENTWISE)
@dtypes
def test_every_epilogue(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """The sums are those of what is stored, the same bits at each run; what is stored is that of the other kernel."""
    device = torch.device("cuda")
    assert elementwise_kernels.has_native(torch.empty(1, device=device)), (
        "the question makes the device known"
    )
    for shape in SHAPES:
        x, grad = (signed(shape, rng).to(device, dtype) for _ in range(2))
        operands = draw_operands(name, shape[-1], ARITHMETICS[dtype], device, rng)
        is_whole, is_long = shape[-1] * dtype.itemsize % 16 == 0, shape[-1] * dtype.itemsize >= 128
        # Of short rows the kernel could sum the columns, but it is not asked.
        assert elementwise_kernels.sums_columns(x, shape[-1]) == (is_whole and is_long)
        for bias in (None, operands.bias):
            given = EPILOGUES[name].in_order(bias, operands.tensors, operands.scalars)
            assert given is not None
            call = ElementwiseCall(EPILOGUES[name], x, given)
            sums = [poisoned((shape[-1],), dtype, device) for _ in range(2)]
            results = []
            for each in sums:
                poison_free_memory(device)
                results.append(entry.derivative(call, grad, each))
            is_served = is_whole and x.numel() > 0
            assert all(isinstance(result, Tensor) == is_served for result in results)
            if not is_served:
                continue
            first, second = results
            plain = entry.derivative(call, grad)
            assert isinstance(first, Tensor) and isinstance(second, Tensor) and isinstance(plain, Tensor)
            assert torch.equal(first, second) and torch.equal(*sums)
            assert torch.equal(first, plain)
            assert_sums(sums[0], first)


@pytest.mark.gpu
def test_addresses_that_are_not_aligned() -> None:
    x, grad = (torch.randn(8 * 32 + 1, device="cuda")[1:].view(8, 32) for _ in range(2))
    sums = torch.empty(32, device="cuda")
    assert elementwise_kernels.sums_columns(x, 32)
    call = ElementwiseCall(BIAS_RELU, x, (None,))
    assert entry.derivative(call, grad, sums) is Reason.NOT_READABLE
    with torch.no_grad():  # as in a backward pass
        found, of_bias = gradients.elementwise_gradients(call, grad, (True, True))
    assert found is not None and of_bias is not None
    torch.testing.assert_close(of_bias, found.sum(0))


@pytest.mark.gpu
def test_special_values() -> None:
    """Where a relu cuts, an infinite gradient does not count; elsewhere it does."""
    x, grad = torch.ones(40, 32, device="cuda"), torch.ones(40, 32, device="cuda")
    x[3, :4], grad[3, 0], grad[3, 1] = -1.0, float("inf"), float("nan")
    grad[5, 5], grad[6, 6] = float("inf"), float("nan")
    sums = torch.empty(32, device="cuda")
    assert elementwise_kernels.sums_columns(x, 32)
    assert isinstance(entry.derivative(ElementwiseCall(BIAS_RELU, x), grad, sums), Tensor)
    assert sums[:4].tolist() == [39.0] * 4 and sums[4] == 40
    assert sums[5] == float("inf") and bool(sums[6].isnan())


# --- users' epilogues ------------------------------------------------------------------------------------------------


@epigemm.epilogue
def mixed(
    acc: Tensor, bias: PerColumn, scale: PerColumn, residual: Matrix, gain: PerRow, limit: Scalar
) -> Tensor:
    return torch.tanh(acc + bias) * scale * limit + residual * gain


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("begins", [0, 1], ids=["aligned", "one element in"])
@pytest.mark.parametrize("learns", [False, True], ids=["the bias", "every operand"])
def test_of_a_users_epilogue(dtype: torch.dtype, learns: bool, begins: int, rng: torch.Generator) -> None:
    """Against autograd in float64; without a bias, it was added to x before."""
    device, step = torch.device("cuda"), torch.finfo(dtype).eps

    def drawn(*sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        return (torch.randn(begins + count, generator=rng) / 2).to(device, dtype)[begins:].view(sizes)

    for shape in SHAPES[:-1]:
        *rows, n = shape
        given = [drawn(*shape), drawn(n), drawn(n), drawn(*shape), drawn(*rows, 1)]
        epilogue = typed(mixed.traced, [False] * 4 + [True])
        for bias in (given[1], None):
            call = ElementwiseCall(epilogue, given[0], (bias, *given[2:], 1.5))
            x, offset, scale, residual, gain = (each.detach().double().requires_grad_() for each in given)
            z = x if bias is None else x + offset
            exact = torch.tanh(z) * scale * 1.5 + residual * gain
            for grad in (drawn(*shape), drawn(*shape, 2)[..., 0], drawn(1).expand(shape)):
                poison_free_memory(device)
                found = derivative.gradients(call, grad, (True, True, *[learns] * 3, False))
                assert found is not None and found[0] is not None and found[1] is not None
                assert_sums(found[1], found[0])
                leaves = (x, scale, residual, gain)
                wanted = torch.autograd.grad(exact, leaves, grad.double(), retain_graph=True)
                for mine, other in zip((found[0], *found[2:5]), wanted, strict=True):
                    assert (mine is not None) == (learns or other is wanted[0])
                    if mine is not None:
                        bound = 16 * step * max(1.0, x.numel() / mine.numel()) ** 0.5
                        torch.testing.assert_close(mine.double(), other, rtol=bound, atol=bound)
                summed = derivative.of_x_and_sums(call, grad)
                is_served = elementwise_kernels.sums_columns(x.to(dtype), n) and begins == 0
                assert (summed is not None) == (is_served and grad.is_contiguous())
                if summed is not None:
                    assert torch.equal(summed[0], found[0]) and torch.equal(summed[1], found[1])
