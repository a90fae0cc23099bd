"""Measured choices in dispatch: which problems they decide, and that a plan is made to fit the problem it meets."""

from __future__ import annotations

import json
import threading
import timeit
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epigemm import plans, tables
from epigemm._native import build_info, ops
from epigemm.tables import Entry
from tests.gemm.test_dispatch import cluster_size, padding

DEVICE = 40  # of which no test machine has so many
H200 = (90, 132)
EDGES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
BASE = Entry("relu_div", "bfloat16", "ieee", False, True, False, 8192, 8192, 1024, (3, 0, 2, 1), 100.0, 200.0)
ON_PIECES = replace(BASE, dtype="float32", arithmetic="split", packed=True, plan=(1, 0, 2, 1))


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    ops._clear_tuned(DEVICE)
    yield
    ops._clear_tuned(DEVICE)


def ask(entry: Entry, m: int | None = None, *, device: int = DEVICE, **changed: Any) -> dict[str, Any]:
    """What dispatch says of the call that an entry is about, aligned, at `m` rows."""
    n, k = entry.n, entry.k
    m = entry.m if m is None else m
    if entry.arithmetic in ("split", "scaled"):
        problem = (entry.epilogue, m, n, k, entry.packed, entry.arithmetic, entry.tf32_allowed)
        return plans.ask(*problem, *H200, entry.bias, device)
    values = {
        "strides": (k, k, n),
        "alignment": 256,
        "arithmetic": entry.arithmetic,
        "bias": entry.bias,
        **changed,
    }
    text = ops._plan_linear(
        entry.epilogue,
        m,
        n,
        k,
        *values["strides"],
        values["alignment"],
        entry.dtype,
        values["arithmetic"],
        *H200,
        values["bias"],
        device,
    )
    answer: dict[str, Any] = json.loads(text)
    return answer


def test_buckets() -> None:
    edges = [int(ops._tuned_bucket(m)) for m in range(1, 4097)]
    assert sorted(set(edges)) == EDGES
    assert all(edge >= m for m, edge in enumerate(edges, 1))
    assert all(edge == next(e for e in EDGES if e >= m) for m, edge in enumerate(edges, 1))
    assert [int(ops._tuned_bucket(m)) for m in (0, 65536, 65537, 2**40)] == [1, 65536, 65536, 65536]
    assert int(ops._tuned_bucket(49152)) == 49152 and int(ops._tuned_bucket(49153)) == 65536


@pytest.mark.parametrize("entry", [BASE, ON_PIECES], ids=["16 bits", "pieces"])
def test_a_measured_plan_is_taken(entry: Entry) -> None:
    before = ask(entry)
    assert before["source"] == "model"
    tables.install(DEVICE, [entry])
    plan = ask(entry)
    assert plan["fused"] and plan["source"] == "cache"
    assert plan["plan"] == list(entry.plan) == plan["candidates"][0]["plan"]
    assert (plan["measured_us"], plan["second_path_measured_us"]) == (entry.fused_us, entry.torch_us)
    assert plan["predicted_us"] > 0 and plan["second_path_us"] == before["second_path_us"]
    assert ["measured_us" in candidate for candidate in plan["candidates"]].count(True) == 1
    numbers = [tuple(candidate["plan"]) for candidate in plan["candidates"]]
    assert len(set(numbers)) == len(numbers)
    ops._clear_tuned(DEVICE)
    assert ask(entry) == before


@pytest.mark.parametrize("entry", [BASE, ON_PIECES], ids=["16 bits", "pieces"])
def test_torchs_path_where_that_was_faster(entry: Entry) -> None:
    tables.install(DEVICE, [replace(entry, torch_us=99.0)])
    plan = ask(entry)
    assert not plan["fused"] and plan["candidates"][0]["measured_us"] == 100.0
    assert plan["why_not"] == "PyTorch's own path was measured to be faster (99 us against 100 us fused)"


def test_a_fused_kernel_where_the_model_would_not_take_one() -> None:
    entry = replace(BASE, epilogue="bias_relu", m=512, n=11008, k=4096)
    assert not ask(entry)["fused"]
    tables.install(DEVICE, [entry])
    assert ask(entry)["fused"]


OTHERS: dict[str, dict[str, Any]] = {
    "epilogue": {"epilogue": "sigmoid_scale_residual"},
    "dtype": {"dtype": "float16"},
    "n": {"n": 4096},
    "k": {"k": 4096},
    "bucket": {"m": 1536},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_other_calls_are_left_to_the_model(changed: dict[str, Any]) -> None:
    tables.install(DEVICE, [BASE])
    other = replace(BASE, **changed)
    assert ask(other)["source"] == "model"


@pytest.mark.parametrize(
    "changed", [{"packed": False}, {"tf32_allowed": True}, {"arithmetic": "scaled"}], ids=str
)
def test_other_calls_on_pieces_are_left_to_the_model(changed: dict[str, Any]) -> None:
    tables.install(DEVICE, [ON_PIECES])
    assert ask(replace(ON_PIECES, **changed))["source"] == "model"


def test_devices_are_told_apart() -> None:
    tables.install(DEVICE, [BASE])
    assert [ask(BASE, device=device)["source"] for device in (DEVICE, DEVICE + 1, 0, -1)] == [
        "cache",
        "model",
        "model",
        "model",
    ]


def test_a_bias_counts_where_torch_adds_the_relu_too() -> None:
    entry = replace(BASE, epilogue="bias_relu")
    tables.install(DEVICE, [entry])
    assert ask(entry)["source"] == "cache"
    assert ask(replace(entry, bias=False))["source"] == "model"
    # Neither does a result with gaps between its rows get its ReLU from cuBLAS.
    assert ask(entry, strides=(8192, 8192, 8200))["source"] == "model"
    # Elsewhere torch's path is the same with and without one.
    tables.install(DEVICE, [BASE])
    assert ask(replace(BASE, bias=False))["source"] == "cache"


def test_the_users_choice_replaces_the_shipped_one() -> None:
    tables.install(DEVICE, [BASE], shipped=True)
    assert ask(BASE)["source"] == "default"
    tables.install(DEVICE, [replace(BASE, plan=(2, 1, 1, 1))])
    plan = ask(BASE)
    assert plan["source"] == "cache" and plan["plan"] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "changed", [{"alignment": 8}, {"strides": (8193, 8192, 8192)}, {"strides": (8192, 8192, 8193)}], ids=str
)
def test_a_plan_never_runs_what_it_does_not_cover(changed: dict[str, Any]) -> None:
    tables.install(DEVICE, [BASE])
    plan = ask(BASE, **changed)
    assert not plan["fused"] and "fused kernels need" in plan["why_not"]
    assert plan["source"] == "model" and plan["candidates"] == []


def test_a_measured_tf32_sum_that_is_too_long_does_not_run() -> None:
    """cuBLAS splits such sums: one accumulator would be less accurate, however fast it was."""
    entry = replace(BASE, dtype="float32", arithmetic="tf32", tf32_allowed=True, k=200_000, plan=(0, 0, 1, 1))
    tables.install(DEVICE, [entry])
    plan = ask(entry)
    assert not plan["fused"] and plan["source"] == "model" and "less accurate than cuBLAS" in plan["why_not"]


def test_accuracy_comes_before_a_measurement() -> None:
    """Below K = 128 the split is not as accurate as fp32, however fast it was."""
    entry = replace(ON_PIECES, k=64)
    tables.install(DEVICE, [entry])
    plan = ask(entry)
    assert not plan["fused"] and "K = 64 is below 128" in plan["why_not"]


@pytest.mark.parametrize("entry", [BASE, ON_PIECES], ids=["16 bits", "pieces"])
@pytest.mark.parametrize("swizzle", [1, 2, 4, 8])
def test_swizzles_fit_every_m_of_the_bucket(entry: Entry, swizzle: int) -> None:
    """Measured at the edge, a strip may not divide the grid of fewer rows: padding costs up to a factor of 2.8."""
    for edge in (512, 1024, 4096):
        tables.install(DEVICE, [replace(entry, m=edge, plan=(*entry.plan[:2], swizzle, 1))])
        for m in range(edge * 3 // 4 + 1, edge + 1, 37):
            plan = ask(entry, m)
            assert plan["source"] == "cache" and plan["plan"][:2] == list(entry.plan[:2])
            assert padding(plan, m, entry.n) <= 0.04, (m, plan)
        assert ask(entry, edge)["swizzle"] == swizzle, "at the edge it is as it was measured"


def test_a_fitting_swizzle_is_kept() -> None:
    tables.install(DEVICE, [replace(BASE, plan=(4, 0, 2, 1))])
    for m in (900, 1000):
        plan = ask(BASE, m)
        assert plan["swizzle"] == 2 and cluster_size(plan)[0] == 2


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tile", {"plan": (1000, 0, 1, 1)}, "tile_index must be in"),
    ("negative tile", {"plan": (-1, 0, 1, 1)}, "tile_index must be in"),
    ("raster", {"plan": (0, 2, 1, 1)}, "raster must be"),
    ("swizzle", {"plan": (0, 0, 9, 1)}, "max_swizzle must be"),
    ("splits", {"plan": (0, 0, 1, 3)}, "splits must be"),
    ("m", {"m": 1000}, "edge of a bucket"),
    ("n", {"n": 0}, "must be positive"),
    ("time", {"fused_us": 0.0}, "times must be positive"),
    ("pieces", {"arithmetic": "split"}, "only float32"),
]


@pytest.mark.parametrize(("changed", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_rows_are_refused_whole(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        tables.install(DEVICE, [BASE, replace(BASE, **changed)])
    assert ask(BASE)["source"] == "model"


@given(rows=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 9), max_size=40))
def test_no_numbers_crash_it(rows: list[int]) -> None:
    try:
        ops._load_tuned(DEVICE, rows, False)
    except RuntimeError:
        return
    assert len(rows) % 15 == 0


def test_the_fingerprint_is_one_of_the_tiles() -> None:
    assert len(build_info()["tiles_fingerprint"]) == 16
    assert int(build_info()["tiles_fingerprint"], 16) > 0


def test_lookups_beside_loads() -> None:
    """Threads that ask see a whole choice, the old one or the new one."""
    choices = [
        replace(BASE, plan=(2, 1, 1, 1), fused_us=50.0),
        replace(BASE, plan=(3, 0, 2, 1), fused_us=60.0),
    ]
    tables.install(DEVICE, choices[:1])
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
        tables.install(DEVICE, [choices[i % 2]])
    stop.set()
    for thread in threads:
        thread.join()
    assert found and all(found)


def test_asking_does_not_slow_down_with_the_table() -> None:
    """A lookup is a hash, not a walk: 20000 choices cost a question no more than twice its time."""

    def seconds() -> float:
        return min(timeit.repeat(lambda: ops._plan_linear(*call), number=100, repeat=7))

    call = ("relu_div", 1024, 8192, 8192, 8192, 8192, 8192, 256, "bfloat16", "ieee", *H200, True, DEVICE)
    tables.install(DEVICE, [BASE])
    few = seconds()
    tables.install(DEVICE, [replace(BASE, n=8 * i, k=8) for i in range(1, 20001)])
    assert seconds() < 2 * few
