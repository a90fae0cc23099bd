"""What batch-invariant calls launch on a GPU, tested on a CPU with PyTorch in place of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.calls import by_reference, elementwise_kernels, weight_slices
from tests.support.choices import forget
from tests.support.layouts import LAYOUTS
from tests.support.pieces import DEVICE
from tests.support.pretended import Pretended, allocate, describe, pretend_gpu
from tests.support.watching import results_of

DTYPES = [torch.float16, torch.bfloat16]


def is_covered(matrix: Tensor, rows: int, columns: int) -> bool:
    """What TMA asks of a matrix."""
    flat = matrix.view(rows, columns)
    size = matrix.element_size()
    is_by_rows = flat.stride(1) == 1 and flat.stride(0) * size % 16 == 0
    return is_by_rows and flat.data_ptr() % 16 == 0 and columns * size % 16 == 0


class Launches(Pretended):
    """Stand-ins of the kernels, and what they were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[int]]] = []
        self.short = 0  # calls that find no memory
        self.allocate = self._allocate

    def _allocate(self, size: int) -> Tensor:
        if self.short:
            self.short -= 1
            raise torch.OutOfMemoryError
        return allocate(size)

    def linear(self, number: int, x: Tensor, weight: Tensor, *others: Any) -> Any:
        before = len(self.ran), len(self.launches)
        found = super().linear(number, x, weight, *others)
        if not isinstance(found, Tensor) or len(self.ran) == before[0]:
            return found
        assert others[7], "each is batch invariant"
        arithmetic = self.ran[-1][0]
        if len(self.launches) > before[1]:
            self.seen.append((arithmetic, [int(self.launches[-1].packed)]))
        elif x.dtype is torch.float32 and arithmetic == "ieee":
            self.seen.append(("fp32", []))
        else:
            (n, k), m = weight.shape, x.numel() // x.shape[-1]
            assert is_covered(x, m, k) and is_covered(weight, n, k) and is_covered(found, m, n)
            self.seen.append(("tensors", [m, n, k]))
        return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    pretend_gpu(monkeypatch, DEVICE, found)
    forget(DEVICE)
    with epigemm.batch_invariant():
        yield found
    weight_slices.shortages.clear()


def product(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


def check(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert bias is not None
    expected = torch.relu(x.double() @ weight.double().t() + bias.double())
    tolerance = 2e-2 if x.dtype is torch.bfloat16 else 5e-3 if x.dtype is torch.float16 else 1e-3
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * x.shape[-1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 16, 24), (1, 16, 24), (5, 15, 21), (1, 1, 1), (7, 3, 64)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_16_bits_in_any_layout(
    launches: Launches, dtype: torch.dtype, shape: tuple[int, int, int], layout: Any
) -> None:
    """What TMA cannot read or write is copied and padded, and multiplied by the same kernel."""
    x, weight, bias = product(*shape, dtype)
    for given_x, given_weight in ((layout(x), weight), (x, layout(weight))):
        check(epigemm.linear_relu(given_x, given_weight, bias), x, weight, bias)
        out = layout(torch.empty(shape[:2], dtype=dtype))
        assert epigemm.linear_relu(given_x, given_weight, bias, out=out) is out
        check(out, x, weight, bias)
    assert len(launches.seen) == 4
    assert all(n % 8 == 0 and k % 8 == 0 and m == shape[0] for _, (m, n, k) in launches.seen)


def test_folded_vectors_are_padded_too(launches: Launches) -> None:
    x, weight, bias = product(6, 13, 20, torch.float16)
    mean, var, gain, offset = (torch.rand(13) + 0.5 for _ in range(4))
    actual = epigemm.linear_scale_batch_norm(x, weight, bias, None, mean, var, gain, offset)
    with epigemm.batch_invariant(False):
        z = x.double() @ weight.double().t() + bias.double()
        expected = (z - mean) / torch.sqrt(var.double() + 1e-5) * gain + offset
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)
    assert launches.seen == [("tensors", [6, 16, 24])]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("k", [64, 192])
def test_fp32_results_in_any_layout(launches: Launches, layout: Any, k: int) -> None:
    """In multiply-adds and on pieces, whose kernels store whole 16 bytes."""
    for n in (12, 13):
        x, weight, bias = product(10, n, k)
        out = layout(torch.empty(10, n))
        assert epigemm.linear_relu(layout(x), layout(weight), layout(bias[None])[0], out=out) is out
        check(out, x, weight, bias)
        split_out = torch.empty(5, 2, n).transpose(0, 1)
        epigemm.linear_relu(x.view(2, 5, k), weight, bias, out=split_out)
        check(split_out.reshape(10, n), x, weight, bias)
    assert {kind for kind, _ in launches.seen} == {"fp32" if k == 64 else "split"}


def test_doubles_are_refused_before_anything_is_launched(launches: Launches) -> None:
    """Not even the fold of a BatchNorm."""
    x, weight, bias = product(4, 16, 256, torch.float64)
    vector = torch.rand(16, dtype=torch.float64)
    for call in (
        lambda: epigemm.linear_relu(x, weight, bias),
        lambda: epigemm.linear_scale_batch_norm(x, weight, bias, None, vector, vector, vector, vector),
        lambda: epigemm.explain("linear_relu", x, weight, bias),
    ):
        says = r"x: got float64 on cpu in the batch-invariant mode.*; accepted"
        functions = elementwise_kernels.fold_batch_norm, by_reference.of_call
        with results_of(*functions) as launched, pytest.raises(RuntimeError, match=says):
            call()
        assert not launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gpus_before_ampere_are_refused(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    describe(monkeypatch, (75, 40))
    forget(DEVICE)  # forgets the plans of the GPU that it was
    x, weight, bias = product(4, 16, 256, dtype)
    for precision in (None, "ieee", "tf32"):
        with pytest.raises(RuntimeError, match=r"x: got .*this device has 7\.5\); accepted"):
            epigemm.linear_relu(x, weight, bias, precision=precision)
    assert not launches.seen
