"""torch's own path of the linear functions: which of its kernels run, and that bias and ReLU are right in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import execution, precision, torch_gemm
from epigemm.epilogues import BIAS, BIAS_RELU, RELU_DIV
from epigemm.precision import DEFAULT, Roads
from tests.support import reference
from tests.support.arithmetic import BF16, FP16, FP32, FP64, STORAGE, Arithmetic
from tests.support.cases import Operands
from tests.support.untyped import backends

WITH_RELU = [FP16, BF16, FP32]
arithmetics = pytest.mark.parametrize("arithmetic", WITH_RELU, ids=lambda a: a.name)
SHAPES = [(24, 40, 32), (1, 40, 32), (24, 1, 32), (24, 40, 1), (1, 1, 1), (129, 257, 96)]


@pytest.fixture
def in_one_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device on which torch's GEMM adds bias and ReLU: the CPU too, where the operator exists."""
    monkeypatch.setattr(torch_gemm, "_CUBLAS_DEVICES", ("cpu", "cuda"))
    return device


def second_path(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return execution.second_path(BIAS_RELU, x, weight, bias, (), (), DEFAULT, out)


def draw(shape: tuple[int, int, int], arithmetic: Arithmetic, device: torch.device) -> tuple[Tensor, ...]:
    m, n, k = shape
    return tuple(torch.randn(size).to(device, arithmetic.dtype) for size in ((m, k), (n, k), (n,)))


def check(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor, arithmetic: Arithmetic) -> None:
    """Against float64, rounded once; a single column twice, by torch's mm and by our kernel."""
    operands, twice = Operands(bias=bias), weight.shape[0] == 1
    bounded = reference.linear("bias_relu", x, weight, operands, arithmetic, second_path=twice)
    reference.assert_within(actual, bounded)


def launched(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        second_path(x, weight, bias, out)
    names = {event.key for event in profile.key_averages()}
    return names & {"aten::_addmm_activation", "aten::mm", "aten::addmm", "epigemm::_elementwise_out"}


@arithmetics
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_and_relu_in_one_kernel(
    arithmetic: Arithmetic, shape: tuple[int, int, int], in_one_kernel: torch.device
) -> None:
    x, weight, bias = draw(shape, arithmetic, in_one_kernel)
    check(second_path(x, weight, bias), x, weight, bias, arithmetic)
    # A single column is a matrix times a vector to torch, which rounds before it adds the bias.
    assert ("aten::_addmm_activation" in launched(x, weight, bias)) == (shape[1] > 1)
    out = torch.full((shape[0], shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    assert second_path(x, weight, bias, out) is out
    check(out, x, weight, bias, arithmetic)


@arithmetics
def test_strided_and_leading_dimensions(arithmetic: Arithmetic, in_one_kernel: torch.device) -> None:
    x, weight, bias = draw((24, 40, 64), arithmetic, in_one_kernel)
    for view in (x[:, ::2], x[::2, :32], x[:, 32:], x.view(64, 24).t()[:, :32]):
        check(second_path(view, weight[:, :32], bias), view, weight[:, :32], bias, arithmetic)
    batched = x[:, :32].reshape(2, 3, 4, 32)
    actual = second_path(batched, weight[:, :32], bias)
    assert actual.shape == (2, 3, 4, 40)
    check(actual.view(24, 40), x[:, :32], weight[:, :32], bias, arithmetic)


@arithmetics
def test_nan_and_infinities_are_those_of_torch_relu(
    arithmetic: Arithmetic, in_one_kernel: torch.device
) -> None:
    x, weight, bias = (torch.ones_like(each) for each in draw((24, 40, 32), arithmetic, in_one_kernel))
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
    weight[5, 5], bias[7] = float("nan"), float("nan")
    expected = torch.relu(torch.nn.functional.linear(x, weight, bias))
    assert bool(expected[0].isnan().all()) and bool(expected[:, [5, 7]].isnan().all())
    torch.testing.assert_close(second_path(x, weight, bias), expected, rtol=0, atol=0, equal_nan=True)


def test_where_torchs_gemm_does_not_add_the_relu(in_one_kernel: torch.device) -> None:
    """Another epilogue, no bias, gaps in bias or out, float64, an empty sum, one column: ours, and right."""
    x, weight, bias = draw((24, 40, 32), FP32, in_one_kernel)
    gaps = torch.empty(24, 48, device=x.device)[:, :40]
    spread = torch.randn(80, device=x.device)[::2]
    assert torch_gemm.adds_relu(BIAS_RELU, x, weight, bias, DEFAULT, None)
    for epilogue in (BIAS, RELU_DIV):
        assert not torch_gemm.adds_relu(epilogue, x, weight, bias, DEFAULT, None)
    cases: list[tuple[Any, ...]] = [
        (x, weight, None, None),
        (x, weight, spread, None),
        (x, weight, bias, gaps),
        (x.double(), weight.double(), bias.double(), None),
        (x[:, :0], weight[:, :0], bias, None),
        (x[:0], weight, bias, None),
        (x, weight[:1], bias[:1], None),
    ]
    for call in cases:
        assert "epigemm::_elementwise_out" in launched(*call)
        expected = torch.relu(torch.nn.functional.linear(*call[:3]))
        torch.testing.assert_close(second_path(*call), expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "tf32", "expected"),
    [
        ((16, 8192, 8192), torch.float32, False, False),
        ((15, 8192, 8192), torch.float32, False, True),
        ((16, 8192, 8192), torch.float32, True, True),
        ((16, 8192, 8192), torch.bfloat16, False, True),
        ((16, 8192, 2048), torch.float32, False, True),
        ((512, 8192, 8192), torch.float32, False, True),
    ],
    ids=["few tiles, long K", "few rows", "TF32", "16 bits", "short K", "tiles for all multiprocessors"],
)
def test_a_plain_fp32_product_that_splits_k_comes_without_the_relu(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tf32: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, n, k = shape
    x, weight, bias = (torch.empty(size, dtype=dtype, device="meta") for size in ((m, k), (n, k), (n,)))
    monkeypatch.setattr(precision, "roads", lambda asked, device_type: Roads(("ieee",), tf32))
    monkeypatch.setattr(torch_gemm, "_CUBLAS_DEVICES", ("meta",))
    assert torch_gemm.adds_relu(BIAS_RELU, x, weight, bias, DEFAULT, None) is expected
    assert torch_gemm.adds_bias(BIAS, x, weight, bias, DEFAULT) is expected
    assert torch_gemm.adds_bias(BIAS, x, weight, None, DEFAULT), "nothing to add"


@pytest.mark.parametrize(("k", "one_kernel"), [(64, True), (4096, False)])
def test_explain_tells_whether_the_bias_is_a_kernel_of_its_own(
    k: int, one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_gemm, "_CUBLAS_DEVICES", ("cpu",))
    x, weight, bias = draw((24, 40, k), FP32, torch.device("cpu"))
    told = epigemm.explain("linear", x, weight, bias).kernels
    assert len(told) == (1 if one_kernel else 2) and ("with the bias" in told[0]) is one_kernel
    actual = execution.second_path(BIAS, x, weight, bias, (), (), DEFAULT, None)
    bounded = reference.linear("bias", x, weight, Operands(bias=bias), FP32, second_path=not one_kernel)
    reference.assert_within(actual, bounded)


def test_bias_alone_stays_addmm(device: torch.device) -> None:
    x, weight, bias = draw((24, 40, 32), FP32, device)
    out = torch.empty(24, 40, device=device)
    actual = execution.second_path(BIAS, x, weight, bias, (), (), DEFAULT, out)
    torch.testing.assert_close(actual, torch.addmm(bias, x, weight.t()))


@pytest.mark.parametrize("wish", ["highest", "ieee"])
def test_precision_overrides_hold(
    wish: str, in_one_kernel: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's setting is switched for the GEMM with the ReLU as well."""
    x, weight, bias = draw((64, 64, 256), FP32, in_one_kernel)
    setting = backends.cuda.matmul if x.is_cuda else backends.mkldnn.matmul
    setting.fp32_precision = "tf32" if x.is_cuda else "bf16"
    before, seen = setting.fp32_precision, []
    native = torch_gemm._addmm_activation_out

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(setting.fp32_precision)
        result: Tensor = native(*args, **kwargs)
        return result

    monkeypatch.setattr(torch_gemm, "_addmm_activation_out", watch)
    actual = execution.second_path(BIAS_RELU, x, weight, bias, (), (), wish, None)
    assert seen == ["ieee"] and setting.fp32_precision == before
    check(actual, x, weight, bias, FP32)


def test_explain_lists_one_launch(in_one_kernel: torch.device) -> None:
    x, weight, bias = draw((24, 40, 33), BF16, in_one_kernel)
    kernels = epigemm.explain("linear_relu", x, weight, bias).kernels
    assert kernels == ["torch GEMM (_addmm_activation, with the bias and the ReLU)"]
    kernels = epigemm.explain("linear_relu", x, weight).kernels
    assert len(kernels) == 2 and kernels[0] == "torch GEMM (mm)"


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_one_launch_on_a_gpu(arithmetic: Arithmetic) -> None:
    """What explain says is what the profiler sees."""
    x, weight, bias = draw((1024, 512, 512), arithmetic, torch.device("cuda"))
    out = second_path(x, weight, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        second_path(x, weight, bias, out)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.device_type.name == "CUDA"]
    behind = [name for name in kernels if "epigemm" in name or "at::native" in name]
    assert bool(behind) == (arithmetic is FP64), kernels
