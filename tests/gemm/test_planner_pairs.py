"""Pairs of products, `epilogue(x @ weight.T, ..., x @ weight2.T)`: which plans there are, and when one is chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import BIAS, FUNCTIONS
from epigemm.epilogues.registry import Epilogue, typed
from epigemm.planner import dry_runs
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.reasons import Reason
from tests.gemm.query import H200, tile_size
from tests.support.plans import FAMILIES, SWAP_AB, TMA, numbers
from tests.support.pretended import describe

GATED = typed(FUNCTIONS["gated_silu"], (False, False))
TILES = range(FAMILIES[TMA]["pairs"])


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    describe(monkeypatch)


def ask(
    sizes: tuple[int, int, int] = (4096, 4096, 2048),
    *,
    epilogue: Epilogue = GATED,
    dtype: torch.dtype = torch.bfloat16,
    weights: tuple[Tensor, Tensor] | None = None,
    operands: Sequence[Tensor] | None = None,
    plan: Sequence[int] = (),
    tried: bool = False,
    **changed: Any,
) -> DryRun:
    """A dry run of a pair; its operands are a bias unless said otherwise."""
    m, n, k = sizes
    first, second = weights or (torch.empty(n, k, dtype=dtype), torch.empty(n, k, dtype=dtype))
    given = (torch.empty(n, dtype=dtype),) if operands is None else operands
    call = LinearCall(epilogue, torch.empty(m, k, dtype=dtype), first, operands=given, weight2=second)
    return dry_runs.dry_run(call._replace(**changed), plan=tuple(plan), tried=tried)


def forced(tile: int = 0, family: str = TMA) -> tuple[int, ...]:
    return (0, *numbers(family, tile))


def test_a_pair_is_no_product_to_the_cache_of_plans() -> None:
    """The same call with a matrix in place of the second weight has its own plan."""
    epilogue = typed(FUNCTIONS["gated_relu"], (False, False))
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    weight, gate = x[:4096], torch.empty(8192, 4096, dtype=torch.bfloat16)
    tail = (None, 0, 0, 0, False, False, (0, *H200), None, False)  # plans are kept for devices with a number

    def fused(operands: list[Tensor] | None, weight2: Tensor | None) -> bool:
        answer = ops._dry_linear(epilogue.name, x, weight, None, operands, None, *tail, weight2)
        return bool(json.loads(answer)["fused"])

    x, gate = x[:16], gate[:16]
    for _ in range(2):
        assert not fused(None, weight)
        assert fused([gate], None)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_tile_can_be_forced(tile: int, dtype: torch.dtype) -> None:
    found = ask(dtype=dtype, plan=forced(tile))
    name = str(dtype).removeprefix("torch.")
    assert found.fused and found.plan == tuple(numbers(TMA, tile)) and found.answer == 0
    assert found.launches == ["fused"]
    assert found.missing == [f"epigemm_open_sm90_tma_{name}_{tile}_pair"]


@pytest.mark.parametrize(("changed", "words"), [
    ({"plan": forced(0, SWAP_AB)}, "sm90_swap_ab does not multiply by two weights"),
    ({"plan": (1, *forced()[1:]), "dtype": torch.float32}, "multiplies x by two weights in this arithmetic"),
    ({"plan": (2, *numbers("sm90_fp16x3"))}, "multiplies x by two weights in this arithmetic"),
    ({"plan": forced(), "sizes": (512, 512, 511)}, "K = 511"),
    ({"plan": forced(), "sizes": (512, 511, 512)}, "N = 511"),
])  # fmt: skip
def test_what_no_kernel_takes_is_refused(changed: dict[str, Any], words: str) -> None:
    assert words in ask(**changed).refused


def test_what_is_no_pair() -> None:
    bias, gate = torch.empty(512, dtype=torch.bfloat16), torch.empty(512, 512, dtype=torch.bfloat16)
    small, wide, by_columns = gate[:511], torch.empty(512, 520, dtype=torch.bfloat16)[:, :512], gate.t()
    sizes = (512, 512, 512)
    both = ask(sizes, operands=(bias, gate), plan=forced())
    assert both.answer == Reason.DOES_NOT_FIT, "the first matrix is the second product"
    bare = ask(sizes, epilogue=BIAS, operands=(bias,), plan=forced())
    assert bare.answer == Reason.DOES_NOT_FIT, "nothing reads the second product"
    for other in (small, gate.float()):
        assert ask(sizes, weights=(gate, other), plan=forced()).answer == Reason.DOES_NOT_FIT
    for other in (wide, by_columns):  # no two strides
        assert ask(sizes, weights=(gate, other), plan=forced()).answer == Reason.NO_PAIR


def predicted(found: DryRun, tile: tuple[int, int]) -> float:
    """Microseconds of a large tile."""
    return next(
        float(each["predicted_us"])
        for each in found.tried[0].plan["candidates"]
        if each["family"] == TMA and tile_size(each) == tile and each["schedule"] != "cooperative transposed"
    )


@pytest.mark.parametrize("sizes", [(8192, 8192, 4096), (4096, 2048, 512), (1024, 4096, 8192)], ids=str)
def test_a_pair_takes_as_long_as_its_products_less_what_is_not_written(sizes: tuple[int, int, int]) -> None:
    """Two products of N columns are one of 2N, but for half of the results and of their epilogue."""
    m, n, k = sizes
    call = LinearCall(
        BIAS, torch.empty(m, k, dtype=torch.bfloat16), torch.empty(2 * n, k, dtype=torch.bfloat16)
    )
    pair = predicted(ask(sizes, tried=True), (128, 128))
    double = predicted(dry_runs.dry_run(call, tried=True), (128, 256))
    single = predicted(dry_runs.dry_run(call._replace(weight=call.weight[:n]), tried=True), (128, 256))
    assert single < pair < 1.1 * double  # of another class of epilogues, too
