"""What runs a call, as csrc/call decides it: numbers and words agree, and each circumstance has its effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import ORDERS
from epigemm.epilogues.library import BIAS, BIAS_RELU, RELU_DIV
from epigemm.planner import dry_runs
from epigemm.planner.dry_runs import SHIFTS, DryRun
from epigemm.planner.reasons import Reason
from tests.support.pretended import describe

H200 = (90, 132, 1980, 4285000)
IEEE, HIGHEST, IN_TF32, HIGH, TF32 = ORDERS[:5]


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    describe(monkeypatch)


def call_of(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> LinearCall:
    """A bare product, of tensors that nobody fills."""
    return LinearCall(BIAS, torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype))


def run(call: LinearCall, order: Any, tried: bool = False, **costs: int) -> DryRun:
    slices = sum(value << SHIFTS[name] for name, value in costs.items())
    return dry_runs.dry_run(call, slices, order=order, tried=tried)


def decided(call: LinearCall, order: Any, **costs: int) -> tuple[bool, str]:
    found = run(call, order, False, **costs)
    return found.fused, found.arithmetic if found.fused else ""


def told(call: LinearCall, order: Any, **costs: int) -> list[dry_runs.Tried]:
    return run(call, order, True, **costs).tried


sizes = st.sampled_from([1, 3, 16, 100, 512, 513, 2048])


@given(
    m=sizes, n=sizes, k=sizes, order=st.sampled_from(ORDERS[:6]), split=st.integers(0, 3), scaled=st.integers(0, 3),
    epilogue=st.sampled_from([BIAS, BIAS_RELU, RELU_DIV]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_numbers_and_words_agree(
    m: int, n: int, k: int, order: Any, split: int, scaled: int, epilogue: Any, dtype: torch.dtype
) -> None:
    costs = {"split": split, "scaled": scaled}
    call = call_of(m, n, k, dtype)._replace(
        epilogue=epilogue, operands=(None, 2.0) if epilogue.has_scalar else (None,)
    )
    found = run(call, order, True, **costs)
    assert found._replace(tried=[]) == run(call, order, False, **costs)
    first = next((each for each in found.tried if not each.why_not), None)
    if first is None:
        assert not found.fused and not found.on_slices and found.launches[0] == "torch_gemm"
        return
    gemm = found.launches.index("fused")
    before, behind = found.launches[:gemm], found.launches[gemm + 1 :]
    if first.is_on_slices:
        weight = "scales_of_weight" if first.reads_weight else "split_of_weight"
        assert before == [weight, "split_of_x"], "no pack is there"
        assert behind == ["fixup", *["copy_of_result"] * (n % 4 != 0)]
    else:
        assert before == ["copy"] * bool(first.copies) and behind in ([], ["copy"])
    assert found.fused
    assert found.on_slices == first.is_on_slices and found.arithmetic == first.arithmetic
    assert first.plan["fused"] and list(found.plan) == first.plan["plan"]
    assert found.packed == first.packed
    assert (Reason.NOT_STORABLE in found.reasons) == ("copy_of_result" in behind)


@pytest.mark.parametrize(("m", "n", "k"), [(768, 768, 16384), (1024, 1024, 4096), (1024, 2048, 8192)])
def test_a_gradient_of_a_weight_is_split(m: int, n: int, k: int) -> None:
    """dz^T x: no scale of x's columns holds from one step to the next. That of x, dz W, reads the weight as it lies."""
    dz, x, weight = torch.empty(k, m), torch.empty(k, n), torch.empty(k, n)
    of_weight = run(LinearCall(BIAS, dz.t(), x.t()), HIGHEST, True)
    assert of_weight.launches[0] == "split_of_weight"
    assert not any(each.reads_weight for each in of_weight.tried)
    of_x = run(LinearCall(BIAS, torch.empty(m, k), weight.t()), HIGHEST)
    assert of_x.launches[0] == "scales_of_weight"


@pytest.mark.parametrize(("order", "arithmetics"), [
    (IEEE, ["ieee"]),
    (HIGHEST, ["split", "ieee"]),
    (IN_TF32, ["scaled", "tf32"]),
    (HIGH, ["scaled", "tf32", "split"]),
    (TF32, ["tf32"]),
])  # fmt: skip
def test_what_is_tried(order: Any, arithmetics: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(64, 64, 128)
    assert list(order.fused) == arithmetics
    assert [each.arithmetic for each in told(call, order)] == arithmetics
    assert [each.arithmetic for each in told(call_of(64, 64, 128, torch.float16), order)] == ["ieee"]
    describe(monkeypatch, ())
    on_cpu = told(call, order)
    assert [each.arithmetic for each in on_cpu] == [each for each in arithmetics if each not in SHIFTS]
    assert all("not on a CUDA device" in each.why_not for each in on_cpu)


@pytest.mark.parametrize(("order", "k", "arithmetics"), [
    (IEEE, 64, ["ieee"]),
    (HIGHEST, 128, ["split"]),
    (HIGHEST, 127, ["split", "ieee"]),
    (IN_TF32, 8192, ["scaled"]),
    (IN_TF32, 8193, ["scaled", "split"]),
    (HIGH, 15, ["scaled", "split", "ieee"]),
    (TF32, 64, ["tf32"]),
])  # fmt: skip
def test_batch_invariant_calls_come_to_the_first_that_is_accurate(
    order: Any, k: int, arithmetics: list[str]
) -> None:
    for m in (1, 64, 5000):
        call = call_of(m, 64, k)._replace(invariant=True)
        tried = told(call, order)
        ways = [each.arithmetic for each in tried]
        assert ways[: len(arithmetics)] == arithmetics
        assert [not each.why_not for each in tried].index(True) == len(arithmetics) - 1
        assert decided(call, order)[1] == arithmetics[-1]


def test_what_has_to_be_mended() -> None:
    """Each as if it were, in the order in which a call comes by."""
    call = call_of(2048, 1024, 512)
    found = dry_runs.dry_run(call, order=HIGHEST)
    assert found.reasons == [Reason.NOT_LINKED] and found.answer == 0
    assert "epigemm_open_fixup" in found.missing
    by_columns = call._replace(out=torch.empty(1024, 2048).t())
    assert Reason.NOT_STORABLE in dry_runs.dry_run(by_columns, order=HIGHEST).reasons
    unread = call._replace(x=torch.empty(4, 600, 1024)[:, :512, :512].transpose(0, 1))
    assert Reason.NOT_READABLE in dry_runs.dry_run(unread, order=HIGHEST).reasons
    small = call_of(24, 24, 8)
    assert dry_runs.dry_run(small, order=HIGHEST._replace(overrides=True)).reasons == [Reason.OTHER_SETTING]
    assert dry_runs.dry_run(small._replace(strict=True), order=HIGHEST).answer == Reason.NOT_FUSED
    assert dry_runs.dry_run(call_of(0, 8, 8), order=HIGHEST).answer == Reason.IS_EMPTY
    assert dry_runs.dry_run(small._replace(weight=torch.empty(24, 9))).answer == Reason.DOES_NOT_FIT


def test_forced_plans() -> None:
    call = call_of(256, 256, 512, torch.bfloat16)
    found = dry_runs.dry_run(call, plan=(0, 0, 1, 1, 2, 1))
    assert found.fused and found.plan == (0, 1, 1, 2, 1)
    assert dry_runs.dry_run(call, plan=(0,)).fused, "the fastest, whatever the fallback takes"
    gaps = call._replace(x=torch.empty(256, 1024, dtype=torch.bfloat16)[:, ::2])
    refused = dry_runs.dry_run(gaps, plan=(0, 0, 0, 0, 1, 1))
    assert "x is not a row-major matrix" in refused.refused and not refused.reasons


def test_an_mma_kernel_whose_k_is_divided() -> None:
    """With its sums in a workspace, which is limited."""
    mma, multistage, by_elements, few_rows = 3, 4, 8, 7

    def refused(call: LinearCall, tile: int, splits: int) -> str:
        return dry_runs.dry_run(call, plan=(0, mma, tile, 0, 8, splits)).refused

    call = call_of(256, 256, 512, torch.bfloat16)
    for splits in (2, 4, 8):
        found = dry_runs.dry_run(call, plan=(0, mma, multistage, 0, 8, splits))
        assert found.fused and found.plan[4] == splits and not found.refused
    # Stages of 32 and of 64: eight parts of K have one at least.
    for tile, k in ((multistage, 7 * 32), (few_rows, 7 * 64)):
        assert refused(call_of(256, 256, k, torch.bfloat16), tile, 8) == "plan: K is too short for 8 splits"
        assert refused(call_of(256, 256, k + 8, torch.bfloat16), tile, 8) == ""
    assert refused(call, by_elements, 2) == "plan: splits must be 1 for a tile that loads by elements, got 2"
    # Of 4096 x 4096 sums in fp32 there may be one set, not two.
    large = "plan: the sums of 2 splits take 134217728 bytes of workspace; at most 67108864 are allowed"
    assert refused(call_of(4096, 4096, 512, torch.bfloat16), multistage, 2) == large
    assert refused(call_of(2048, 4096, 512, torch.bfloat16), multistage, 2) == ""
    invariant = call._replace(invariant=True)
    assert "splits must be 1 for a batch-invariant call" in refused(invariant, multistage, 2)
