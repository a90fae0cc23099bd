"""torch's own path of the linear functions: which of its kernels run, and that bias and ReLU are right in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import decisions, fallback, plans
from epigemm._native import ops
from epigemm.calls import LinearCall
from epigemm.decisions import PRODUCT, WITH_BIAS, WITH_BIAS_AND_RELU
from epigemm.epilogues import BIAS, BIAS_RELU, RELU_DIV, Epilogue
from tests.support import reference
from tests.support.arithmetic import BF16, FP16, FP32, FP64, STORAGE, Arithmetic
from tests.support.cases import Operands
from tests.support.untyped import backends

WITH_RELU = [FP16, BF16, FP32]
arithmetics = pytest.mark.parametrize("arithmetic", WITH_RELU, ids=lambda a: a.name)
SHAPES = [(24, 40, 32), (1, 40, 32), (24, 1, 32), (24, 40, 1), (1, 1, 1), (129, 257, 96)]


NOTHING_KNOWN = (-1,)
"""A GPU without epigemm's kernels, of whose speed nothing is known."""
WITH_KERNELS = (-1, 90, 132)


@pytest.fixture
def in_one_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device on which torch's GEMM adds bias and ReLU: the CPU too, where the operator exists."""
    if device.type == "cpu":
        monkeypatch.setattr(decisions, "_described", lambda x: NOTHING_KNOWN)
    return device


def second_path(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return fallback.linear(LinearCall(BIAS_RELU, x, weight, bias, out=out))


def gemm_of(epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """What torch's GEMM is to do."""
    scalars = (2.0,) if epilogue.scalar else ()
    return fallback.gemm_of(LinearCall(epilogue, x, weight, bias, (), scalars))


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
    assert gemm_of(BIAS_RELU, x, weight, bias) == WITH_BIAS_AND_RELU
    assert gemm_of(BIAS, x, weight, bias) == WITH_BIAS
    assert gemm_of(RELU_DIV, x, weight, bias) == PRODUCT
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


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as lying on a GPU with epigemm's kernels."""
    monkeypatch.setattr(decisions, "_described", lambda x: WITH_KERNELS)
    monkeypatch.setattr(plans, "has_gpu_kernels", lambda tensor: True)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("arithmetic", WITH_RELU, ids=lambda a: a.name)
@pytest.mark.parametrize(
    "sizes", [(15, 8192, 4096), (15, 128, 4096), (15, 1001, 4096), (1, 128, 256)], ids=str
)
def test_the_planner_says_whether_a_product_comes_without_the_bias(
    sizes: tuple[int, int, int], arithmetic: Arithmetic, tf32: bool, with_kernels: None
) -> None:
    """By the call's sizes, its dtype and, in fp32, torch's setting."""
    m, n, k = sizes
    backends.mkldnn.matmul.fp32_precision = "bf16" if tf32 else "ieee"
    dtype = arithmetic.dtype
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((1, m, k), (n, k), (n,)))
    name = str(dtype).removeprefix("torch.")
    one_kernel = is_one_kernel(m, n, k, name, tf32 and dtype == torch.float32, WITH_KERNELS[1:])
    apart = (
        WITH_BIAS if dtype.itemsize == 2 else PRODUCT
    )  # a bias is added before the sum is rounded to 16 bits
    assert gemm_of(BIAS_RELU, x, weight, bias) == (WITH_BIAS_AND_RELU if one_kernel else apart)
    assert gemm_of(BIAS, x, weight, bias) == (WITH_BIAS if one_kernel else apart)
    assert gemm_of(BIAS, x, weight, None) == PRODUCT, "nothing to add"
    if sizes == (15, 8192, 4096):
        assert one_kernel == (tf32 or dtype != torch.float32)


def is_one_kernel(m: int, n: int, k: int, dtype: str, tf32_allowed: bool, gpu: tuple[int, ...]) -> bool:
    """What the planner says of such a product on a GPU that is described."""
    return bool(ops._is_fallback_one_kernel(m, n, k, dtype, tf32_allowed, gpu or None, -1))


def test_the_planner_is_not_asked_about_float64(with_kernels: None) -> None:
    for arithmetic, expected in ((FP32, PRODUCT), (FP64, WITH_BIAS)):
        x, weight, bias = draw((16, 40, 4096), arithmetic, torch.device("cpu"))
        assert gemm_of(BIAS, x, weight, bias) == expected


@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_the_planner_is_not_asked_without_kernels(
    arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and on a GPU where epigemm has none."""
    x, weight, bias = draw((16, 40, 4096), arithmetic, torch.device("cpu"))
    assert gemm_of(BIAS, x, weight, bias) == WITH_BIAS
    assert gemm_of(BIAS_RELU, x, weight, bias) == (WITH_BIAS if arithmetic.dtype.itemsize == 2 else PRODUCT)
    monkeypatch.setattr(decisions, "_described", lambda x: NOTHING_KNOWN)
    assert gemm_of(BIAS, x, weight, bias) == WITH_BIAS
    assert gemm_of(BIAS_RELU, x, weight, bias) == (PRODUCT if arithmetic is FP64 else WITH_BIAS_AND_RELU)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nothing_is_known_of_cublas_without_a_gpu(dtype: str) -> None:
    for sizes in ((16, 8192, 8192), (16, 8191, 8192), (0, 8, 8), (8, 0, 8), (8, 8, 0)):
        assert is_one_kernel(*sizes, dtype, False, ())


# (rule, dtype, torch's setting, multiprocessors; inside: M, N, K that come without the bias; outside: that do not)
H200, SMALL = 132, 40
Sizes = tuple[int, int, int]
RULES: list[tuple[str, str, bool, int, list[Sizes], list[Sizes]]] = [
    (
        "plain fp32",
        "float32",
        False,
        H200,
        # Below 3 * 132 = 396 tiles, aligned or not; fewer rows where there are few columns too; one row or three
        # where both sides of the weight are long.
        [
            (16, 395 * 128, 512),
            (395 * 128, 2, 512),
            (8, 1000, 512),
            (8, 1, 512),
            (8, 999, 513),
            (5 * 128, 79 * 128, 8192),
            *((m, n, 512) for m in (2, 3, 7) for n in (1, 999)),
            *((m, n, k) for m in (1, 3) for n in (8000, 500 * 128) for k in (6000, 6001)),
        ],
        [
            (16, 395 * 128 + 1, 512),
            (395 * 128 + 1, 2, 512),
            (6 * 128, 66 * 128, 8192),
            (8, 1000, 511),
            (7, 999, 511),
            (2, 1000, 512),
            (7, 1000, 512),
            (7, 1000, 100_000),
            (1, 1, 512),
            (1, 999, 512),
            *((m, 7999, 6000) for m in (1, 3)),
            *((m, 8000, 5999) for m in (1, 3)),
            *((m, 8000, 6000) for m in (2, 4, 7)),
        ],
    ),
    (
        "plain fp32, a small GPU",
        "float32",
        False,
        SMALL,
        [(8, 119 * 128, 512), (1, 500 * 128, 6000)],
        [(8, 120 * 128, 512)],
    ),
    # Three tiles for each of two multiprocessors.
    ("plain fp32, a tiny GPU", "float32", False, 2, [(7, 5 * 128, 512)], [(7, 5 * 128 + 1, 512)]),
    (
        "TF32",
        "float32",
        True,
        H200,
        # 0.15 * 132 = 19.8 tiles; any number for 33 to 64 rows, where K is longer and columns are not too many.
        [
            (16, 19 * 128, 4096),
            (19 * 128, 4, 4096),
            (1, 4, 4096),
            (128, 128, 100_000),
            *((m, n, 8196) for m in (33, 64) for n in (20 * 128, 12000)),
        ],
        [
            (16, 19 * 128 + 4, 4096),
            (129, 10 * 128, 4096),
            (16, 19 * 128, 4092),
            (19 * 128 + 1, 4, 4096),
            *((m, 12000, 8196) for m in (32, 65)),
            *((m, n, k) for m in (33, 64) for n, k in ((12004, 8196), (12000, 8192))),
        ],
    ),
    (
        "TF32, a small GPU",
        "float32",
        True,
        SMALL,
        [(16, 5 * 128, 4096), (33, 12000, 8196)],
        [(16, 6 * 128, 4096)],
    ),
    (
        "misaligned TF32",
        "float32",
        True,
        H200,
        # Below 132 tiles, whichever side is not whole 16 bytes; every remainder counts.
        [
            (17, 131 * 128 - 1, 700),
            (131 * 128, 4, 701),
            (11 * 128, 11 * 128 - 1, 8192),
            *((17, 8192 + i, 700) for i in (1, 2, 3)),
            *((17, 8192, 700 + i) for i in (1, 2, 3)),
        ],
        [
            (17, 131 * 128 + 1, 700),
            (131 * 128 + 1, 4, 701),
            (12 * 128, 11 * 128 - 1, 8192),
            (17, 8191, 699),
            (17, 8192, 700),
            (16, 8191, 700),
            (16, 8191, 100_000),
            (64, 131 * 128 + 1, 8193),
        ],
    ),
    (
        "misaligned TF32, a small GPU",
        "float32",
        True,
        SMALL,
        [(17, 39 * 128 - 1, 700)],
        [(17, 39 * 128 + 1, 700)],
    ),
    (
        "16 bits",
        "16 bits",
        False,
        H200,
        [],
        [(16, 8192, 8192), (16, 128, 16384), (16, 8, 512), (128, 128, 100_000), (17, 131 * 128, 100_000)],
    ),
    (
        "16 bits off lines",
        "16 bits",
        False,
        H200,
        # Rows that begin off 64 bytes: K is a multiple of 8 and none of 32.
        [
            *((m, n, 8200) for m in (129, 512) for n in (8, 8192, 500 * 128)),
            (129, 8192, 8208),
            (512, 8192, 8216),
            (512, 16384, 100_008),
        ],
        [
            *((m, n, 8200) for m in (1, 128, 513) for n in (8, 8192, 500 * 128)),
            *((512, 8192, k) for k in (8184, 8192, 8224, 8256)),
        ],
    ),
    ("16 bits off lines, a small GPU", "16 bits", False, SMALL, [(129, 8192, 8200)], [(128, 8192, 8200)]),
    (
        "misaligned 16 bits",
        "16 bits",
        False,
        H200,
        # Below 2 * 132 = 264 tiles, whichever side is not whole 16 bytes; every remainder counts.
        [
            (2, 263 * 128 - 1, 512),
            (263 * 128, 8, 513),
            (2, 8, 519),
            (11, 5349, 3280),  # in bf16 `_addmm_activation` has more than twice eager's error here
            (9 * 128, 29 * 128 - 1, 512),
            (512, 8191, 8200),
            *((2, 8192 + i, 512) for i in range(1, 8)),
            *((2, 8192, 512 + i) for i in range(1, 8)),
        ],
        [
            (2, 263 * 128 + 1, 512),
            (263 * 128 + 1, 8, 513),
            (11 * 128, 24 * 128 - 1, 512),
            (512, 66 * 128 - 1, 8200),
            (2, 8191, 511),
            (2, 8191, 504),
            (2, 8192, 511),
            (2, 8192, 512),
            (1, 8191, 512),
            (1, 8191, 100_000),
        ],
    ),
    (
        "misaligned 16 bits, a small GPU",
        "16 bits",
        False,
        SMALL,
        [(2, 79 * 128 - 1, 512)],
        [(2, 79 * 128 + 1, 512)],
    ),
    ("float64", "float64", False, H200, [], [(16, 8191, 8191), (16, 8192, 8192)]),
]


@pytest.mark.parametrize(
    ("dtype", "tf32", "multiprocessors", "inside", "outside"),
    [rule[1:] for rule in RULES],
    ids=[rule[0] for rule in RULES],
)
def test_where_a_bias_comes_in_a_kernel_of_its_own(
    dtype: str,
    tf32: bool,
    multiprocessors: int,
    inside: list[Sizes],
    outside: list[Sizes],
) -> None:
    """The rule at its limits, for GPUs that are described; an empty product is never split."""
    gpu = (90, multiprocessors)
    for name in ("float16", "bfloat16") if dtype == "16 bits" else (dtype,):
        for sizes, expected in [*((s, False) for s in inside), *((s, True) for s in outside)]:
            assert is_one_kernel(*sizes, name, tf32, gpu) is expected, (name, sizes)
        for empty in ((0, 8191, 8191), (16, 0, 8191), (16, 8191, 0)):
            assert is_one_kernel(*empty, name, tf32, gpu)


def test_a_bias_of_one_column_comes_with_the_product() -> None:
    """Only a ReLU needs a second kernel there, and that is for `choose_gemm` to know."""
    for dtype in ("float16", "bfloat16", "float32"):
        assert is_one_kernel(64, 1, 256, dtype, False, (90, H200))


@pytest.mark.parametrize("epilogue", ["bias", "bias_relu"])
def test_predictions_follow_the_same_rule(epilogue: str) -> None:
    """At the limit of K the fallback's time is that of one kernel, then that of two."""
    told = []
    for k in (511, 512):
        answers = [
            plans.ask(name, 16, 1000, k, "float32", "split", has_bias=has_bias, gpu=(90, H200, 1980, 4285000))
            for name, has_bias in ((epilogue, True), ("bias_relu", False))
        ]
        told.append(answers[0]["fallback_us"] == answers[1]["fallback_us"])
    assert told == [False, True], "without a bias a ReLU is always a second kernel"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 8192, 8192), False),
        ((2, 8192, 8192), True),
        ((16, 8192, 256), True),
        ((4096, 4096, 4096), True),
    ],
    ids=["few tiles, long K", "two rows", "short K", "tiles for all multiprocessors"],
)
def test_a_plain_fp32_product_that_splits_k_comes_without_the_bias(
    shape: tuple[int, int, int], expected: bool
) -> None:
    """As measured on an H200, by a wide margin: 202 us with the bias at 16x8192x8192, 151 without."""
    if not torch.cuda.is_available():
        pytest.skip("gpu: torch sees no CUDA device")
    assert ops._is_fallback_one_kernel(*shape, "float32", False, None, 0) is expected


@pytest.mark.parametrize(("k", "one_kernel"), [(64, True), (4096, False)])
def test_explain_tells_whether_the_bias_is_a_kernel_of_its_own(
    k: int, one_kernel: bool, with_kernels: None
) -> None:
    x, weight, bias = draw((24, 40, k), FP32, torch.device("cpu"))
    told = epigemm.explain("linear", x, weight, bias, precision="ieee").kernels
    assert len(told) == (1 if one_kernel else 2) and ("with the bias" in told[0]) is one_kernel
    actual = fallback.linear(LinearCall(BIAS, x, weight, bias, precision="ieee"))
    bounded = reference.linear("bias", x, weight, Operands(bias=bias), FP32, second_path=not one_kernel)
    reference.assert_within(actual, bounded)


def test_bias_alone_stays_addmm(device: torch.device) -> None:
    x, weight, bias = draw((24, 40, 32), FP32, device)
    out = torch.empty(24, 40, device=device)
    actual = fallback.linear(LinearCall(BIAS, x, weight, bias, out=out))
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
    native = fallback._addmm_activation_out

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(setting.fp32_precision)
        result: Tensor = native(*args, **kwargs)
        return result

    monkeypatch.setattr(fallback, "_addmm_activation_out", watch)
    actual = fallback.linear(LinearCall(BIAS_RELU, x, weight, bias, precision=wish))
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
    """What explain says is what the profiler sees, where cuBLAS has no reason to split K."""
    x, weight, bias = draw((1024, 512, 256), arithmetic, torch.device("cuda"))
    out = second_path(x, weight, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        second_path(x, weight, bias, out)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.device_type.name == "CUDA"]
    behind = [name for name in kernels if "epigemm" in name or "at::native" in name]
    assert bool(behind) == (arithmetic is FP64), kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [15, 16])
def test_a_bias_is_added_before_the_sum_is_rounded(dtype: torch.dtype, k: int, device: torch.device) -> None:
    """A product that is rounded to 16 bits first loses what it and its bias cancel to."""
    generator = torch.Generator().manual_seed(k)
    x = (4 + torch.randn(6, k, generator=generator) / 10).to(device, dtype)
    weight = (1 + torch.randn(8, k, generator=generator) / 50).to(device, dtype)
    bias = torch.full((8,), -4.0 * k, device=device, dtype=dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for result, expected in (
        (epigemm.linear_silu(x, weight, bias), torch.nn.functional.silu(exact)),
        (epigemm.linear_sigmoid_scale_residual(x, weight, bias, 2.0), exact + 2 * exact.sigmoid()),
        (epigemm.linear_relu(x, weight, bias), exact.relu()),
    ):
        # Two roundings of a sum, of a slope of at most 1.5.
        bound = 3 * torch.finfo(dtype).eps / 2 * exact.abs().amax() + 1e-3
        assert float((result.double() - expected).abs().max()) <= float(bound)
