"""What calls with further results tell the entry of an fp32 product, and what is made where it lacks something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn
from epigemm.arguments.calls import LinearCall
from epigemm.calls import beside, deeds, entry
from epigemm.epilogues.parts import Wanted
from epigemm.epilogues.registry import BIAS
from epigemm.packs import weight_packs
from epigemm.planning import dry_runs, plans
from epigemm.planning.reasons import Reason
from tests.gemm.query import H200
from tests.support.answers import Answers


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)
    monkeypatch.setattr(weight_packs, "capturing", lambda device: False)


@pytest.fixture
def reduced_setting() -> Iterator[None]:
    """torch may use TF32."""
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]


def call(dtype: torch.dtype = torch.float32, **more: str) -> LinearCall:
    x, weight = torch.empty(4096, 1024, dtype=dtype), torch.empty(2048, 1024, dtype=dtype)
    return LinearCall(BIAS, x, weight, **more)  # type: ignore[arg-type]


def told(made: LinearCall) -> tuple[object, ...]:
    return beside.options(made, dry_runs.order_on(made, "cpu"), dry_runs.ROUTED)


def test_other_types_have_one_arithmetic() -> None:
    assert told(call(torch.bfloat16)) == (0, None, 0, False, False, dry_runs.ROUTED, None, None)


@pytest.mark.parametrize(("precision", "order"), [("highest", 1), ("high", 3), ("tf32", 4), ("ieee", 0)])
def test_the_arithmetics_of_a_precision(precision: str, order: int) -> None:
    assert told(call(precision=precision))[:3] == (order, None, 0)


@pytest.mark.usefixtures("reduced_setting")
def test_a_setting_of_torchs_that_is_less_accurate() -> None:
    circumstances = told(call(precision="highest"))[5]
    assert circumstances == dry_runs.ROUTED | dry_runs.OTHER_SETTING


def test_packs_are_looked_up_by_the_deeds_where_the_entry_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one is stale."""
    found = (torch.empty(1), None), 7
    monkeypatch.setattr(entry, "slices_at_hand", lambda *_: None)
    monkeypatch.setattr(deeds, "find_packs", lambda made: found)
    assert told(call())[1:3] == found


def test_a_weight_that_keeps_its_pack() -> None:
    """It is made for many calls, so it costs this one nothing."""
    costs = told(call(pack_use=weight_packs.KEEP))[2]
    assert costs == sum(dry_runs.NO_COST << shift for shift in dry_runs.SHIFTS.values())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_pack_is_made(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the arithmetic of the call with all of its results; False where there was no memory."""
    made: list[tuple[LinearCall, str]] = []

    def make_pack(call: LinearCall, arithmetic: str) -> bool:
        made.append((call, arithmetic))
        return is_there

    monkeypatch.setattr(deeds, "make_pack", make_pack)
    asked = call(pack_use=weight_packs.KEEP)
    moments = Wanted(columns=True, rows=False, needs_columns=True)
    order = dry_runs.order_on(asked, "cpu")
    assert beside.is_mended(Reason.LACKS_PACK, asked, order, int(moments.columns)) == is_there
    assert made == [(asked, "split")]


@epigemm.epilogue
def doubled(acc: Tensor, bias: PerColumn) -> Tensor:
    return (acc + bias) * 2


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "_fp16x3_split_"), (torch.bfloat16, "_tma_bfloat16_")]
)
def test_a_kernel_is_linked(dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask_with_moments")
    plain = call(dtype)
    made, _ = doubled.plain_call(plain.x, plain.weight, [torch.empty(2048, dtype=dtype)], strict=False)
    assert beside.is_mended(Reason.NOT_LINKED, made, dry_runs.order_on(made, "cpu"))
    assert kernel in answers.linked[-1]


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_LINKED, Reason.LACKS_PACK}))
def test_nothing_is_done_about_other_reasons(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask_with_moments")
    made = call()
    assert not beside.is_mended(reason, made, dry_runs.order_on(made, "cpu")) and not answers.linked
