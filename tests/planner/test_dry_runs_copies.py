"""16-bit operands that TMA cannot address: copied, read by elements, or left to PyTorch, whichever is the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.calls.resolve import _Linear
from epigemm.epilogues.library import BIAS_RELU
from epigemm.epilogues.registry import EPILOGUES
from epigemm.planner import dry_runs, times
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.gpus import KNOWN
from epigemm.planner.times import Entry
from tests.support.choices import forget
from tests.support.layouts import LAYOUTS
from tests.support.plans import MMA, ON_COPIES, TMA, numbers
from tests.support.pretended import describe

Sizes = tuple[int, int, int]
H200 = (90, 132, 1980, 4285000)
HOPPER = pytest.mark.parametrize("gpu", ["H100", "H200"])
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
GELU = EPILOGUES["bias_gelu_tanh"]
FEW_TILES = [(1987, 432, 55), (113, 1568, 183), (179, 784, 159)]
"""M, N, K. On an H100 such calls took 8 to 12 us by elements, and 11 to 17 us otherwise."""
DEVICE = 41  # of which no test machine has so many


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    describe(monkeypatch)


def call_of(
    sizes: Sizes, x: str = "contiguous", weight: str = "contiguous", *, dtype: torch.dtype = torch.bfloat16
) -> LinearCall:
    """Bias and GELU, of tensors that lie as `tests.support.layouts` says."""
    m, n, k = sizes
    of_x, of_weight = torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype)
    return LinearCall(GELU, LAYOUTS[x](of_x), LAYOUTS[weight](of_weight), (torch.zeros(n, dtype=dtype),))


def run(call: LinearCall, gpu: str = "", **options: object) -> DryRun:
    described = {"gpu": KNOWN[gpu].numbers} if gpu else {}
    return dry_runs.dry_run(call, tried=True, **described, **options)  # type: ignore[arg-type]


@HOPPER
@HALVES
@pytest.mark.parametrize(("sizes", "weight", "copies"), ON_COPIES)
def test_what_is_clearly_decided(
    sizes: Sizes, weight: str, copies: int, dtype: torch.dtype, gpu: str
) -> None:
    """The products that tests on a GPU expect to run on copies."""
    found = run(call_of(sizes, "contiguous", weight, dtype=dtype), gpu)
    (tried,) = found.tried
    assert found.fused and found.launches.count("copy") == copies
    assert tried.plan["fallback_us"] > 1.25 * tried.plan["predicted_us"]


@HOPPER
@HALVES
@pytest.mark.parametrize(("sizes", "x"), [
    *((sizes, "contiguous") for sizes in FEW_TILES),
    ((1024, 1024, 64), "misaligned"), ((1024, 1024, 64), "odd_rows"),
], ids=str)  # fmt: skip
def test_few_tiles_are_read_as_they_lie(sizes: Sizes, x: str, dtype: torch.dtype, gpu: str) -> None:
    found = run(call_of(sizes, x, dtype=dtype), gpu)
    (tried,) = found.tried
    assert found.fused and found.launches == ["fused"]
    assert {(each["family"], each["schedule"]) for each in tried.plan["candidates"]} == {(MMA, "by elements")}
    name = str(dtype).removeprefix("torch.")
    assert found.missing == [f"epigemm_open_sm80_mma_{name}_{tried.plan['plan'][1]}"]
    assert tried.plan["fallback_us"] >= 1.2 * tried.plan["predicted_us"]


def test_an_out_that_is_refused() -> None:
    """Rows that are no whole 16 bytes; a result by columns is stored elsewhere, as before."""
    call = call_of((1024, 1024, 1024))
    like = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    for layout, copies in {"contiguous": 0, "padded_rows": 0, "odd_rows": 1, "misaligned": 1}.items():
        found = run(call._replace(out=LAYOUTS[layout](like)))
        assert found.fused and found.launches.count("copy") == copies, layout
    found = run(call._replace(out=like.t()))
    assert not found.fused and "out is not a row-major matrix" in found.tried[0].why_not


@pytest.mark.parametrize("turned", ["x", "weight"])
def test_remembered_plans_tell_columns_apart(turned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the columns of a transposed matrix are apart decides how fast cuBLAS reads it."""
    sides, k = 2048, 256

    def fuses(pitch: int, device: int) -> bool:
        describe(monkeypatch, index=device)
        columns = torch.zeros(k, pitch, dtype=torch.bfloat16)[:, :sides].t()
        call = call_of((sides, sides, k))._replace(epilogue=BIAS_RELU)
        return run(call._replace(x=columns) if turned == "x" else call._replace(weight=columns)).fused

    for first, second, device in ((3072, 3073, 14), (3073, 3072, 15)):
        found = [fuses(pitch, device) for pitch in (first, second)]
        assert found == [fuses(pitch, -1) for pitch in (first, second)] == [first == 3073, second == 3073]


def test_without_memory_the_fallback_runs() -> None:
    """It takes none; a strict call, and one whose plan is forced, end in the error."""
    for strict, plan, falls_back in (
        (False, None, True),
        (True, None, False),
        (False, (0, 0, 1, 1, 2, 1), False),
    ):
        attempt = _Linear(call_of((1024, 1024, 1023))._replace(strict=strict), plan)
        resolve._do_with_less_memory(attempt)
        assert (attempt.plan == dry_runs.FALLBACK) == falls_back
        assert bool(attempt.circumstances & dry_runs.RAISES_SHORTAGE) != falls_back


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of which something is measured."""
    describe(monkeypatch, index=DEVICE)
    yield DEVICE
    forget(DEVICE)


ODD = Entry("bias_gelu_tanh", "bfloat16", "ieee", False, True, False, 0, 0, 0, (), 10.0, 20.0)
BY_ELEMENTS, BY_TMA = tuple(numbers(MMA, 9, swizzle=8)), tuple(numbers(TMA, 3))


@pytest.mark.parametrize("sizes", [FEW_TILES[0], (1024, 1024, 1023)], ids=str)
@pytest.mark.parametrize(("plan", "launches"), [(BY_ELEMENTS, ["fused"]), (BY_TMA, ["copy", "fused"])])
@pytest.mark.parametrize("forced", [(), (0,)], ids=["chosen", "the fastest"])
def test_a_measured_plan_runs_as_it_was_measured(
    sizes: Sizes, plan: tuple[int, ...], launches: list[str], forced: tuple[int, ...], device: int
) -> None:
    """On copies or on the operands as they lie, whichever the models would choose."""
    m, n, k = sizes
    times.install(device, [replace(ODD, m=m, n=n, k=k, plan=plan)])
    found = run(call_of(sizes), plan=forced)
    assert found.fused and found.plan == plan and found.launches == launches
    if not forced:
        assert found.tried[0].plan["source"] == "cache"
        assert not (found.tried[0].copies and plan == BY_ELEMENTS)


def test_what_is_measured_belongs_to_sizes(device: int) -> None:
    """Aligned tensors of the same sizes are read by TMA; another layout takes other copies."""
    times.install(device, [replace(ODD, m=1024, n=1024, k=64, plan=BY_TMA, torch_us=5.0)])
    for x, tunable in (("contiguous", True), ("misaligned", False), ("odd_rows", False)):
        (tried,) = run(call_of((1024, 1024, 64), x)).tried
        assert tried.tunable == tunable
        assert tried.plan["source"] == ("cache" if tunable else "model")
    for sizes in (*FEW_TILES, (1024, 1023, 1023), (1024, 1024, 1024)):
        assert run(call_of(sizes)).tried[0].tunable
