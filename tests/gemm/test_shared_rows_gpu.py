"""Every kernel with a matrix that has a row for several of the result's, such as a gate `[B, 1, N]` of each batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn
from epigemm.arguments import forms
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import derivative, resolve
from epigemm.planner import dry_runs
from tests.gemm.test_epilogue_operands_gpu import KERNELS, Kernel, kernels
from tests.support import plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

EVERY = [
    *KERNELS,
    *kernels(torch.float16, "ieee", plans.SWAP_AB, 1e-2, "16_bits"),
    *kernels(torch.bfloat16, "ieee", plans.SWAP_AB, 1e-2, "16_bits"),
    *kernels(torch.float32, "tf32", plans.SWAP_AB, 1e-2),
]
SIZES = [
    ((1, 1), 8, 8),
    ((4, 75), 264, 72),
    ((65, 2), 392, 200),
    ((3, 1, 43), 136, 64),
    ((2, 5, 13), 96, 520),
]
every_kernel = pytest.mark.parametrize(
    "kernel", EVERY, ids=lambda each: f"{each.dtype}-{each.arithmetic}-{each.family}-{each.tile}"
)


@epigemm.epilogue
def gate_last(acc: Tensor, bias: PerColumn, residual: Matrix, gate: Matrix) -> Tensor:
    """TMA loads the residual, the first matrix."""
    return residual + gate * (acc + bias)


@epigemm.epilogue
def gate_first(acc: Tensor, gate: Matrix, bias: PerColumn, residual: Matrix) -> Tensor:
    """TMA loads the residual, the second matrix."""
    return residual + gate * (acc + bias)


@epigemm.epilogue
def modulated(acc: Tensor, scale: Matrix, shift: Matrix) -> Tensor:
    return torch.tanh(acc) * (1 + scale) + shift


@epigemm.epilogue
def gate_alone(acc: Tensor, gate: Matrix) -> Tensor:
    return acc * gate


def ones_from(lead: Sequence[int], kept: int) -> tuple[int, ...]:
    """The leading sizes of a matrix that has one row for all places along the axes behind the first `kept`."""
    return (*lead[:kept], *(1,) * (len(lead) - kept))


def drawn(*shape: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """With a gap behind each row."""
    whole = torch.randn(*shape[:-1], shape[-1] + gap, device="cuda", dtype=dtype)
    return whole[..., : shape[-1]]


def run(
    function: Any, x: Tensor, weight: Tensor, operands: list[Tensor], kernel: Kernel, splits: int
) -> Tensor:
    out = x.new_full((*x.shape[:-1], weight.shape[0]), math.nan)
    spec = forms.of_types(function.traced, x, operands)
    call = LinearCall(spec, x, weight, operands, out=out)
    numbers = plans.numbers(kernel.family, kernel.tile, splits=splits)
    return resolve.linear(call, (dry_runs.ARITHMETICS.index(kernel.arithmetic), *numbers))


@every_kernel
@pytest.mark.parametrize("gap", [0, 2, 3])
def test_every_tile(kernel: Kernel, gap: int) -> None:
    """`gap`: behind a gate's rows, so that pairs of it lie aligned, or do not."""
    torch.manual_seed(0)
    dtype, tolerance = kernel.dtype, kernel.tolerance
    for lead, n, k in SIZES:
        x = torch.randn(*lead, k, device="cuda", dtype=dtype)
        weight = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
        bias, residual = torch.randn(n, device="cuda", dtype=dtype), drawn(*lead, n, dtype=dtype)
        sums = x.double() @ weight.double().t()
        for kept in range(len(lead)):
            gate = drawn(*ones_from(lead, kept), n, dtype=dtype, gap=gap)
            wide = drawn(*ones_from(lead, kept), n, dtype=torch.float32, gap=gap)
            gated = residual.double() + gate.double() * (sums + bias.double())
            cases = [
                (gate_last, [bias, residual, gate], gated),
                (gate_first, [gate, bias, residual], gated),
                (gate_alone, [gate], sums * gate.double()),
                (modulated, [wide, gate], sums.tanh() * (1 + wide.double()) + gate.double()),
            ]
            is_split = kernel.family == plans.SWAP_AB and k * dtype.itemsize > 128
            for splits in (1, 2) if is_split else (1,):
                for function, operands, expected in cases:
                    found = run(function, x, weight, operands, kernel, splits)
                    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=4 * tolerance)


def test_the_fixup_of_slices() -> None:
    """Rows that fp16 slices do not represent are computed again, with the same gates."""
    lead, n, k = (6, 50), 136, 256
    x = torch.randn(*lead, k, device="cuda")
    x[2, 7, ::2] *= 2.0**-40
    x[2, 7, 1::2] *= 2.0**30
    x[5, 49, 3] = math.inf
    weight = torch.randn(n, k, device="cuda") / k**0.5
    weight[5, 1::2] *= 2.0**-30
    gate, residual = torch.rand(6, 1, n, device="cuda") + 0.5, torch.randn(*lead, n, device="cuda")
    bias = torch.randn(n, device="cuda")
    expected = residual.double() + gate.double() * (x.double() @ weight.double().t() + bias.double())
    for tile in range(plans.tile_count(plans.FP16X3, "split")):
        kernel = Kernel(torch.float32, "split", plans.FP16X3, tile, 0)
        found = run(gate_last, x, weight, [bias, residual, gate], kernel, 1)
        scale = (x.double().abs() @ weight.double().abs().t()) * gate.double() + residual.double().abs() + 3
        assert bool((((found.double() - expected).abs() <= 1e-5 * scale) | ~expected.isfinite()).all())
        assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("begins", [0, 1], ids=["aligned", "one element in"])
@pytest.mark.parametrize("lead", [(1, 9), (3, 7), (64, 1), (2, 3, 5), (77, 5)], ids=str)
@pytest.mark.parametrize("n", [1, 8, 33, 1001])
def test_the_elementwise_kernels(lead: tuple[int, ...], n: int, dtype: torch.dtype, begins: int) -> None:
    """The function of a matrix, and its derivatives: those of a gate are sums over the rows that read it."""
    torch.manual_seed(0)

    def placed(*sizes: int) -> Tensor:
        count = math.prod(sizes)
        return torch.randn(begins + count, device="cuda").to(dtype)[begins:].view(sizes)

    step = torch.finfo(dtype).eps
    for kept in range(len(lead)):
        given = [placed(*lead, n), placed(*lead, n), placed(*ones_from(lead, kept), n)]
        leaves = [each.to(torch.float64, copy=True).requires_grad_() for each in given]  # fp64 ones, too
        expected = leaves[1] + leaves[2] * torch.sin(leaves[0])
        found = sine.elementwise(*given, out=placed(*lead, n).fill_(math.nan))
        torch.testing.assert_close(found.double(), expected.detach(), rtol=4 * step, atol=8 * step)
        grad = placed(*lead, n)
        call = ElementwiseCall(forms.of_types(sine.traced, given[0], given[1:]), given[0], given[1:])
        mine = derivative.gradients(call, grad, (True, True, True))
        assert mine is not None
        wanted = torch.autograd.grad(expected, leaves, grad.double())
        rows = math.prod(lead[kept:])
        for one, other in zip(mine, wanted, strict=True):
            assert one is not None and one.shape == other.shape and one.dtype == dtype
            torch.testing.assert_close(one.double(), other, rtol=8 * step, atol=16 * step * rows**0.5)


@epigemm.epilogue
def sine(acc: Tensor, residual: Matrix, gate: Matrix) -> Tensor:
    return residual + gate * torch.sin(acc)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_calls_and_training(dtype: torch.dtype) -> None:
    """Through the public function, for sizes that several families are chosen for."""
    torch.manual_seed(0)
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-11}[dtype]
    for (b, rows), n, k in [
        ((2, 8), 512, 1024),
        ((4, 256), 1024, 512),
        ((3, 37), 1000, 500),
        ((8, 1000), 768, 768),
    ]:
        x, weight = torch.randn(b, rows, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
        rest = (
            torch.randn(n, device="cuda"),
            torch.randn(b, rows, n, device="cuda"),
            torch.randn(b, 1, n, device="cuda"),
        )
        mine = [each.to(dtype).requires_grad_() for each in (x, weight, *rest)]
        other = [each.detach().double().requires_grad_() for each in mine]
        expected = gate_last.traced.reference(other[0] @ other[1].t(), *other[2:])
        with torch.no_grad():
            plain = gate_last(*mine)
        torch.testing.assert_close(plain.double(), expected.detach(), rtol=tolerance, atol=4 * tolerance)
        found = gate_last(*mine)
        torch.testing.assert_close(found.double(), expected.detach(), rtol=tolerance, atol=4 * tolerance)
        grad = torch.randn_like(found)
        wanted = torch.autograd.grad(expected, other, grad.double())
        for name, one, exact in zip("xwbrg", torch.autograd.grad(found, mine, grad), wanted, strict=True):
            error = (one.double() - exact).norm() / exact.norm()
            assert error <= tolerance, (name, float(error))


def test_batch_invariant_calls() -> None:
    """A row's bits are those of the row alone, also where the operands are copied to rows that TMA reads."""
    for dtype in (torch.bfloat16, torch.float32):
        for n, k in ((264, 72), (259, 75)):
            x, weight = (
                torch.randn(3, 50, k, device="cuda", dtype=dtype),
                torch.randn(n, k, device="cuda", dtype=dtype),
            )
            bias, residual = (
                torch.randn(n, device="cuda", dtype=dtype),
                torch.randn(3, 50, n, device="cuda", dtype=dtype),
            )
            gate = torch.randn(3, 1, n, device="cuda", dtype=dtype)
            with epigemm.batch_invariant():
                whole = gate_last(x, weight, bias, residual, gate)
                part = gate_last(x[1:2, :7], weight, bias, residual[1:2, :7], gate[1:2])
            assert torch.equal(whole[1:2, :7], part)


class Block(torch.nn.Module):
    """The end of a block of DiT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation, self.out = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Any:
        gate, shift = self.modulation(condition).chunk(2, -1)
        return x + gate.unsqueeze(1) * self.out(torch.relu(x) + shift.unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_backend", [False, True], ids=["fuse", "torch.compile"])
def test_fused_models(dtype: torch.dtype, *, with_backend: bool) -> None:
    torch.manual_seed(0)
    model = Block(512).to("cuda", dtype).eval()
    x, condition = (
        torch.randn(4, 300, 512, device="cuda", dtype=dtype),
        torch.randn(4, 512, device="cuda", dtype=dtype),
    )
    made = torch.compile(model, backend="epigemm") if with_backend else epigemm.fuse(model)
    with torch.no_grad():
        for batch in (4, 3, 2):
            found, expected = made(x[:batch], condition[:batch]), model(x[:batch], condition[:batch])
            tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
