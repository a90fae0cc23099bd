"""Column statistics beside a product: what is launched. Reasons of the entry: test_one_kernel.py; values: tests/ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm._native import build_info
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import BIAS
from epigemm.planner import dry_runs
from tests.support.pretended import describe

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
    describe(monkeypatch)
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
