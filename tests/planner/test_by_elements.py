"""On Hopper 16-bit rows that TMA cannot address are read as they lie where that is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.registry import EPILOGUES
from epigemm.planner import dry_runs, plans, times
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.gpus import KNOWN
from epigemm.planner.times import Entry
from tests.support.choices import forget
from tests.support.layouts import LAYOUTS
from tests.support.plans import MMA, TMA, numbers

HOPPER = ["H100", "H200"]
GELU = EPILOGUES["bias_gelu_tanh"]
FEW_TILES = [(1987, 432, 55), (113, 1568, 183), (179, 784, 159)]
"""M, N, K. On an H100 such calls took 8 to 12 us by elements, and 11 to 17 us otherwise."""
DEVICE = 41  # of which no test machine has so many


def call_of(m: int, n: int, k: int, x: str = "contiguous", dtype: torch.dtype = torch.bfloat16) -> LinearCall:
    """Bias and GELU; x lies as `tests.support.layouts` says."""
    of_x, weight = torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype)
    return LinearCall(GELU, LAYOUTS[x](of_x), weight, (torch.zeros(n, dtype=dtype),))


def run(call: LinearCall, gpu: str = "H200", **options: object) -> DryRun:
    return dry_runs.dry_run(call, tried=True, gpu=KNOWN[gpu].numbers, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", HOPPER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "x"), [
    *((sizes, "contiguous") for sizes in FEW_TILES),
    ((1024, 1024, 64), "misaligned"), ((1024, 1024, 64), "odd_rows"),
], ids=str)  # fmt: skip
def test_few_tiles_are_read_as_they_lie(
    sizes: tuple[int, int, int], x: str, dtype: torch.dtype, gpu: str
) -> None:
    found = run(call_of(*sizes, x, dtype=dtype), gpu)
    (tried,) = found.tried
    assert found.fused and found.launches == ["fused"]
    assert tried.plan["family"] == MMA and tried.plan["schedule"] == "by elements"
    assert {each["family"] for each in tried.plan["candidates"]} == {MMA}
    assert (tried.copies, tried.copies_result) == ((), False)
    name = str(dtype).removeprefix("torch.")
    assert found.missing == [f"epigemm_open_sm80_mma_{name}_{tried.plan['plan'][1]}"]
    assert tried.plan["fallback_us"] >= 1.2 * tried.plan["predicted_us"]


@pytest.mark.parametrize("gpu", HOPPER)
@pytest.mark.parametrize(("sizes", "launches"), [
    ((70046, 151, 152), ["fused", "copy"]),
    ((8192, 1023, 1024), ["fused", "copy"]),
    ((8192, 1024, 1023), ["copy", "fused"]),
    ((8192, 1023, 1023), ["copy", "fused", "copy"]),
])  # fmt: skip
def test_many_tiles_are_copied(sizes: tuple[int, int, int], launches: list[str], gpu: str) -> None:
    found = run(call_of(*sizes), gpu)
    assert found.fused and found.launches == launches
    assert found.tried[0].plan["family"] == TMA


@pytest.mark.parametrize("sizes", [(1024, 1024, 1024), (179, 784, 160), (1, 1024, 1024)], ids=str)
def test_rows_of_whole_16_bytes_are_left_to_tma(sizes: tuple[int, int, int]) -> None:
    candidates = run(call_of(*sizes)).tried[0].plan["candidates"]
    assert candidates and MMA not in {each["family"] for each in candidates}


@pytest.mark.parametrize("sizes", FEW_TILES, ids=str)
@pytest.mark.parametrize("gpu", ["A100 80 GB", "L40S", "B200"])
def test_other_gpus_have_no_others(sizes: tuple[int, int, int], gpu: str) -> None:
    """Or they multiply copies, whichever is expected to be faster."""
    (tried,) = run(call_of(*sizes), gpu).tried
    on_copies = "multistage" if tried.copies else "by elements"
    assert {(each["family"], each["schedule"]) for each in tried.plan["candidates"]} == {(MMA, on_copies)}


@pytest.mark.parametrize("sizes", FEW_TILES, ids=str)
def test_a_batch_invariant_call_is_not_changed(sizes: tuple[int, int, int]) -> None:
    found = run(call_of(*sizes)._replace(invariant=True))
    assert not found.fused and "fused kernels need rows of a multiple of 16 bytes" in found.tried[0].why_not


@pytest.mark.parametrize("sizes", FEW_TILES, ids=str)
def test_fp32_is_not_read_by_elements(sizes: tuple[int, int, int]) -> None:
    answer = plans.ask("bias_gelu", *sizes, "float32", "tf32", gpu=KNOWN["H200"].numbers)
    assert not answer["fused"] and answer["candidates"] == []
    assert "fused kernels need rows of a multiple of 16 bytes" in answer["why_not"]


def test_the_fastest_plan_may_be_one_of_both() -> None:
    """Whatever the fallback takes."""
    assert run(call_of(*FEW_TILES[0]), plan=(0,)).launches == ["fused"]
    assert run(call_of(1024, 1024, 1023), plan=(0,)).launches == ["copy", "fused"]


@pytest.fixture
def device() -> Iterator[int]:
    yield DEVICE
    forget(DEVICE)


ODD = Entry("bias_gelu_tanh", "bfloat16", "ieee", False, True, False, 0, 0, 0, (), 10.0, 20.0)
BY_ELEMENTS, BY_TMA = tuple(numbers(MMA, 9, swizzle=8)), tuple(numbers(TMA, 3))


@pytest.mark.parametrize("sizes", [FEW_TILES[0], (1024, 1024, 1023)], ids=str)
@pytest.mark.parametrize(("plan", "launches"), [(BY_ELEMENTS, ["fused"]), (BY_TMA, ["copy", "fused"])])
@pytest.mark.parametrize("forced", [(), (0,)], ids=["chosen", "the fastest"])
def test_a_measured_plan_runs_as_it_was_measured(
    sizes: tuple[int, int, int],
    plan: tuple[int, ...],
    launches: list[str],
    forced: tuple[int, ...],
    device: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On copies or on the operands as they lie, whichever the models would choose."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: device)
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: KNOWN["H200"].numbers[:4])
    m, n, k = sizes
    times.install(device, [replace(ODD, m=m, n=n, k=k, plan=plan)])
    found = dry_runs.dry_run(call_of(*sizes), tried=True, plan=forced)
    assert found.fused and found.plan == plan and found.launches == launches
    if not forced:
        assert found.tried[0].plan["source"] == "cache" and not (
            found.tried[0].copies and plan == BY_ELEMENTS
        )


def test_what_is_measured_belongs_to_sizes(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned tensors of the same sizes are read by TMA."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: device)
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: KNOWN["H200"].numbers[:4])
    times.install(device, [replace(ODD, m=1024, n=1024, k=64, plan=BY_TMA, torch_us=5.0)])
    for x, tunable in (("contiguous", True), ("misaligned", False), ("odd_rows", False)):
        (tried,) = dry_runs.dry_run(call_of(1024, 1024, 64, x), tried=True).tried
        assert tried.tunable == tunable
        assert tried.plan["source"] == ("cache" if tunable else "model")
    assert all(run(call_of(*sizes)).tried[0].tunable for sizes in FEW_TILES)
