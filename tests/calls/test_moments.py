"""Column statistics beside a product: what is launched, and the values. Reasons of the entry: test_one_kernel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm._native import build_info
from epigemm.arguments.calls import LinearCall
from epigemm.calls import moments
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import compute_dtype
from epigemm.planner import dry_runs, plans
from tests.gemm.query import H200
from tests.support.moments import assert_close

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TMA, SWAP_AB = (list(build_info()["families"]).index(name) for name in ("sm90_tma", "sm90_swap_ab"))
TILES = range(build_info()["families"]["sm90_tma"]["16_bits"])


def launches(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    plan: tuple[int, ...] = (),
    *,
    statistics: bool = True,
) -> list[str]:
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((m, k), (n, k), n))
    call = LinearCall(BIAS, x, weight, (bias,), statistics=statistics)
    return dry_runs.dry_run(call, plan=plan).launches


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 large tiles reduce what they store; another kernel reads the result of other kernels.

    Few blocks are not merged by a kernel of their own. A pass over the result counts against a kernel that needs it:
    PyTorch's GEMM adds a bias itself, and with statistics another kernel runs.
    """
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)
    bf16 = torch.bfloat16
    cases: list[tuple[Any, list[str]]] = [
        ((16384, 8192, 8192), ["fused", "merge"]),
        ((2048, 8192, 8192, torch.float16), ["fused", "merge"]),
        *(((1300, 1024, 512, bf16, (0, TMA, tile, 0, 8, 1)), ["fused", "merge"]) for tile in TILES),
        ((16, 4096, 1024, bf16, (0, SWAP_AB, 0, 0, 1, 1)), ["fused", "blocks"]),
        ((4096, 1024, 512, bf16, dry_runs.FALLBACK), ["torch_gemm", "blocks", "merge"]),
        ((2048, 512, 512, torch.float64), ["torch_gemm", "blocks", "merge"]),
        ((1024, 8192, 4096), ["fused"]),
        ((1025, 8192, 4096), ["fused", "merge"]),
    ]
    for given, expected in cases:
        assert launches(*given) == expected, given
    shapes = [(m, n, k) for m in (4096, 8192) for n in (1024, 4096) for k in (512, 1024)]
    assert ["torch_gemm"] in [launches(*shape, statistics=False) for shape in shapes]
    assert [launches(*shape) for shape in shapes] == [["fused", "merge"]] * len(shapes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [65, 1])
def test_values_where_no_kernel_runs(dtype: torch.dtype, rows: int, rng: torch.Generator) -> None:
    """Of the stored matrix, wherever it lies."""
    x, weight, bias = (torch.randn(size, generator=rng).to(dtype) for size in ((rows, 32), (40, 32), 40))
    z, (mean, variance, *_) = moments.with_moments(LinearCall(BIAS, x, weight, (bias,)))
    rounding = 16 * torch.finfo(dtype).eps
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(z.double(), expected, rtol=rounding, atol=8 * rounding)
    assert z.dtype is dtype and mean.dtype is variance.dtype is compute_dtype(dtype)
    assert_close(z, mean, variance)
    assert_close(z.t(), *moments.column_moments(z.t())[:2])
