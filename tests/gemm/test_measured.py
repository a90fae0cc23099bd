"""Measured choices in the planner: which problems they decide, and that nothing runs that a kernel does not cover."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epigemm._native import build_info, ops
from epigemm.planner import times
from epigemm.planner.times import Entry
from tests.support.choices import forget
from tools.planner import ask_planner

DEVICE = 40  # of which no test machine has so many
H200, A100 = (90, 132, 1980, 4285000), (80, 108, 1410, 1555000)
TMA, SWAP_AB, FP16X3, MMA = range(4)
BY_ELEMENTS = (MMA, 9, 0, 8, 1)
BASE = Entry(
    "relu_div", "bfloat16", "ieee", False, True, False, 1024, 8192, 8192, (TMA, 3, 0, 2, 1), 100.0, 200.0
)
IN_TF32 = replace(BASE, dtype="float32", arithmetic="tf32", tf32_allowed=True)
ON_SLICES = replace(BASE, dtype="float32", arithmetic="split", packed=True, plan=(FP16X3, 1, 0, 2, 1))
FEW_ROWS = replace(BASE, m=16, plan=(SWAP_AB, 1, 0, 1, 4))
KINDS = pytest.mark.parametrize(
    "entry", [BASE, ON_SLICES, FEW_ROWS], ids=["large tiles", "slices", "few rows"]
)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    forget(DEVICE)
    yield
    forget(DEVICE)


def ask(
    entry: Entry, m: int | None = None, *, device: int = DEVICE, gpu: tuple[int, ...] = H200, **changed: Any
) -> dict[str, Any]:
    """What the planner says of the call that an entry is about, aligned, at `m` rows."""
    sizes = (entry.epilogue, entry.m if m is None else m, entry.n, entry.k, entry.dtype, entry.arithmetic)
    return ask_planner(
        *sizes,
        packed=entry.packed,
        tf32_allowed=entry.tf32_allowed,
        has_bias=entry.bias,
        gpu=gpu,
        device=device,
        **changed,
    )


def source(entry: Entry, **changed: Any) -> str:
    return str(ask(entry, **changed)["source"])


def test_families_are_numbered_as_here() -> None:
    assert list(build_info()["families"]) == [
        "sm90_tma",
        "sm90_swap_ab",
        "sm90_fp16x3",
        "sm80_mma",
        "sm90_few_rows",
    ]
    assert len(build_info()["tiles_fingerprint"]) == 16 and int(build_info()["tiles_fingerprint"], 16) > 0


ODD = replace(BASE, k=8191, plan=BY_ELEMENTS)


@pytest.mark.parametrize(
    ("entry", "call"),
    [
        *((entry, {"gpu": A100}) for entry in (replace(BASE, plan=(MMA, 4, 0, 8, 1)), ODD)),
        *((ODD, changed) for changed in ({}, {"alignment": 2}, {"strides": (8193, 8195, 8192)})),
        (replace(ON_SLICES, m=16, n=512, k=512, packed=False), {}),  # torch's one kernel is done first
    ],
    ids=str,
)
def test_a_measured_plan_is_taken_whatever_the_model_says(entry: Entry, call: dict[str, Any]) -> None:
    before = ask(entry, **call)
    times.install(DEVICE, [entry])
    after = ask(entry, **call)
    assert before["source"] == "model" and not before["fused"]
    assert after["source"] == "cache" and after["fused"] and tuple(after["plan"]) == entry.plan


@KINDS
def test_a_choice_is_one_for_its_very_m(entry: Entry) -> None:
    """It was measured there and nowhere else: a row more or less is left to the cost models."""
    others = [m for m in (1, entry.m - 1, entry.m + 1, 2 * entry.m, entry.m // 2, 768) if m != entry.m]
    before = {m: ask(entry, m) for m in others}
    times.install(DEVICE, [entry])
    assert source(entry) == "cache"
    assert {m: ask(entry, m) for m in others} == before
    assert {answer["source"] for answer in before.values()} == {"model"}
    invariant = ask(entry, invariant=True)
    assert invariant["source"] == "model", "M would decide"


def test_devices_are_told_apart() -> None:
    for device in (DEVICE, DEVICE + 1):
        times.install(device, [BASE])
    forget(DEVICE)
    found = [source(BASE, device=device) for device in (DEVICE, DEVICE + 1, 0, -1)]
    assert found == ["model", "cache", "model", "model"]
    forget(DEVICE + 1)


@pytest.mark.parametrize(
    ("entry", "changed"),
    [
        *((BASE, each) for each in (
            {"epilogue": "sigmoid_scale_residual"}, {"dtype": "float16"}, {"n": 4096}, {"k": 4096}, {"m": 1023},
        )),
        *((ON_SLICES, each) for each in ({"packed": False}, {"tf32_allowed": True}, {"arithmetic": "scaled"})),
        (replace(BASE, epilogue="bias_relu"), {"bias": False}),  # which cuBLAS adds with the ReLU
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_are_left_to_the_model(entry: Entry, changed: dict[str, Any]) -> None:
    times.install(DEVICE, [entry])
    assert source(entry) == "cache" and source(replace(entry, **changed)) == "model"


def test_where_a_bias_does_not_count() -> None:
    """Where torch's path is the same with and without one. A result with gaps between its rows gets no ReLU either."""
    times.install(DEVICE, [BASE, replace(BASE, epilogue="bias_relu")])
    assert source(replace(BASE, bias=False)) == "cache"
    assert source(replace(BASE, epilogue="bias_relu"), strides=(8192, 8192, 8200)) == "model"


@pytest.mark.parametrize(
    "changed", [{"alignment": 8}, {"strides": (8193, 8192, 8192)}, {"strides": (8192, 8192, 8193)}], ids=str
)
@pytest.mark.parametrize("plan", [BASE.plan, FEW_ROWS.plan, (MMA, 4, 0, 8, 1)], ids=str)
def test_a_plan_never_runs_what_it_does_not_cover(plan: tuple[int, ...], changed: dict[str, Any]) -> None:
    """The model decides, among the kernels that read such rows; in TF32 there are none."""
    times.install(DEVICE, [replace(BASE, plan=plan)])
    found = ask(BASE, **changed)
    assert not found["fused"] and found["source"] == "model"
    assert {each["schedule"] for each in found["candidates"]} == {"by elements"}
    assert list(plan) not in [each["plan"] for each in found["candidates"]]
    times.install(DEVICE, [IN_TF32])
    found = ask(IN_TF32, **changed)
    assert source(IN_TF32) == "cache" and found["source"] == "model"
    assert not found["fused"] and "fused kernels need" in found["why_not"] and found["candidates"] == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        # Of a kernel that does not split K, or of a K too short for it.
        (replace(BASE, plan=(TMA, 0, 0, 1, 2)), ""),
        (replace(ON_SLICES, plan=(FP16X3, 0, 0, 1, 2)), ""),
        (replace(FEW_ROWS, k=64, plan=(SWAP_AB, 1, 0, 1, 2)), ""),
        # cuBLAS splits such sums: one accumulator would be less accurate, however fast it was.
        (replace(IN_TF32, k=200_000), "less accurate than cuBLAS"),
        (replace(ON_SLICES, k=64), "K = 64 is below 128"),
    ],
    ids=["large tiles", "slices", "few rows", "long", "short"],
)
def test_what_cannot_be_or_is_less_accurate_does_not_run(entry: Entry, words: str) -> None:
    times.install(DEVICE, [entry])
    plan = ask(entry)
    assert words in plan["why_not"] and not (words and plan["fused"])
    assert words or all(each["plan"] != list(entry.plan) for each in plan["candidates"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"plan": (5, 0, 0, 1, 1)}, r"plan: family must be in 0\.\.4, got 5"),
    ({"plan": (-1, 0, 0, 1, 1)}, "plan: family must be in"),
    ({"plan": (FP16X3, 0, 0, 1, 1)}, "family 2 does not multiply"),
    ({"plan": (TMA, 1000, 0, 1, 1)}, r"plan: tile must be in 0\.\.18, got 1000"),
    ({"plan": (TMA, -1, 0, 1, 1)}, "plan: tile must be in"),
    ({"plan": (TMA, 0, 2, 1, 1)}, "plan: raster must be 0"),
    ({"plan": (TMA, 0, 0, 9, 1)}, r"plan: swizzle must be in 1\.\.8, got 9"),
    ({"plan": (SWAP_AB, 0, 0, 1, 3)}, "plan: splits must be 1, 2, 4 or 8, got 3"),
    ({"m": 0}, "m, n and k must be positive"),
    ({"n": 0}, "m, n and k must be positive"),
    ({"fused_us": 0.0}, "times must be positive"),
    ({"dtype": "float32", "arithmetic": "split"}, "family 0 does not multiply in this arithmetic"),
    ({"dtype": "float32"}, "family 0 does not multiply in this arithmetic"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG, ids=str)
@pytest.mark.parametrize("device", [DEVICE, -1])
def test_wrong_rows_are_refused_whole(changed: dict[str, Any], words: str, device: int) -> None:
    """For no device, too: as a file is, before it is believed."""
    with pytest.raises(RuntimeError, match=words):
        times.install(device, [BASE, replace(BASE, **changed)])
    assert source(BASE, device=device) == "model"


@given(rows=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 9), max_size=40))
def test_no_numbers_crash_it(rows: list[int]) -> None:
    names = [BASE.epilogue] * (len(rows) // len(BASE.row))
    try:
        ops._load_measured(DEVICE, ",".join(names), rows)
    except RuntimeError:
        return
    assert len(rows) == len(names) * len(BASE.row)


def test_lookups_beside_loads() -> None:
    """Threads that ask see a whole choice, the old one or the new one."""
    choices = [
        replace(BASE, plan=(TMA, 2, 1, 1, 1), fused_us=50.0),
        replace(BASE, plan=(TMA, 3, 0, 2, 1), fused_us=60.0),
    ]
    times.install(DEVICE, choices[:1])
    expected = {(tuple(entry.plan), entry.fused_us) for entry in choices}
    found: list[bool] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            plan = ask(BASE)
            found.append((tuple(plan["plan"]), plan["measured_us"]) in expected)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(300):
        times.install(DEVICE, [choices[i % 2]])
    stop.set()
    for thread in threads:
        thread.join()
    assert found and all(found)
