"""What calls with further results tell the entry of an fp32 product, and what is made where it lacks something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, resolve, weight_slices
from epigemm.calls.resolve import Beside
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import typed
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason
from tests.gemm.query import H200
from tests.support.answers import Answers

MOMENTS = torch.empty(2, 2048)


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)
    monkeypatch.setattr(plans, "has_gpu_kernels", lambda x: True)
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
    return LinearCall(BIAS, x, weight, statistics=True, **more)  # type: ignore[arg-type]


def asked(made: LinearCall, *answers: Any) -> list[tuple[Any, ...]]:
    """What the entry is asked, each time, for such answers; the last one is what the caller gets."""
    seen: list[tuple[Any, ...]] = []
    to_come = iter(answers)

    def ask(*arguments: Any) -> Any:
        seen.append(arguments)
        return next(to_come)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "ask", ask)
        found = resolve.one_kernel(made, Beside(moments=MOMENTS))
    assert found == answers[-1] and all(each[-2] is MOMENTS for each in seen)
    return [each[6:] for each in seen]


def told(made: LinearCall) -> tuple[Any, ...]:
    (options,) = asked(made, "result")
    return options


def test_other_types_have_one_arithmetic() -> None:
    assert told(call(torch.bfloat16)) == (
        0,
        None,
        0,
        False,
        False,
        dry_runs.ROUTED,
        None,
        None,
        None,
        MOMENTS,
        None,
    )


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
    monkeypatch.setattr(resolve._Linear, "find_packs", lambda self: found)
    assert told(call())[1:3] == found


def test_a_weight_that_needs_a_gradient_reads_no_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "slices_at_hand", lambda *_: pytest.fail("a pack was looked up"))
    made = call(pack_use=weight_packs.KEEP)
    made.weight.requires_grad_()
    assert told(made)[:3] == (1, None, 0)


COSTLESS = sum(dry_runs.NO_COST << shift for shift in dry_runs.SHIFTS.values())


def test_a_weight_that_keeps_its_pack() -> None:
    """It is made for many calls, so it costs this one nothing."""
    assert told(call(pack_use=weight_packs.KEEP))[2] == COSTLESS


def test_a_pack_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(weight_packs, "keep", lambda weight, slices: made.append(slices))
    first, second = asked(call(pack_use=weight_packs.KEEP), int(Reason.LACKS_PACK), "result")
    assert made == [2] and first[2] == COSTLESS
    assert second[1] == (None, None)  # nothing has kept it here


@pytest.mark.parametrize("size", [(64, 4096, 4096), (4096, 2048, 1024)])
def test_under_a_capture_no_pack_is_made(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is split into the call's own memory, as by plain calls."""
    monkeypatch.setattr(weight_packs, "capturing", lambda device: True)
    monkeypatch.setattr(weight_packs, "keep", lambda *_: pytest.fail("a pack was made"))
    m, n, k = size
    made = LinearCall(BIAS, torch.empty(m, k), torch.empty(n, k), pack_use=weight_packs.KEEP)
    *_, second = asked(made, int(Reason.LACKS_PACK), "result")
    assert second[1:3] == ((None, None), 0)


def test_a_shortage_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none for a pack: the call is asked for with slices of its own."""

    def keep(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(weight_packs, "keep", keep)
    monkeypatch.setattr(weight_slices, "_shortages", {})
    made = call(pack_use=weight_packs.KEEP)
    first, second = asked(made, int(Reason.LACKS_PACK), "result")
    assert first[2] == COSTLESS and second[2] != COSTLESS
    assert weight_slices.has_been_short()
    monkeypatch.setattr(weight_packs, "keep", lambda *_: None)
    asked(made, int(Reason.LACKS_PACK), "result")
    assert not weight_slices.has_been_short()  # the pack was made


@epigemm.epilogue
def doubled(acc: Tensor, bias: PerColumn) -> Tensor:
    return (acc + bias) * 2


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "_fp16x3_split_"), (torch.bfloat16, "_tma_bfloat16_")]
)
def test_a_kernel_is_linked(dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask")
    plain = call(dtype)
    epilogue = typed(doubled.traced, [False])
    made = LinearCall(epilogue, plain.x, plain.weight, (torch.empty(2048, dtype=dtype),))
    assert len(asked(made, int(Reason.NOT_LINKED), "result")) == 2
    assert kernel in answers.linked[-1]


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_LINKED, Reason.LACKS_PACK}))
def test_nothing_is_done_about_other_reasons(reason: Reason) -> None:
    assert len(asked(call(), int(reason))) == 1


def test_a_call_that_would_be_copied_for_is_not_made() -> None:
    for columns, is_made in ((2048, True), (2046, False)):
        made = LinearCall(BIAS, torch.empty(4096, 1024), torch.empty(columns, 1024), statistics=True)
        dry = dry_runs.dry_run(made)
        assert dry.fused and dry.copies_nothing == is_made
