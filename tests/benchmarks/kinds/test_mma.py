"""`python -m benchmarks --mma`: its tiles and shapes, its ratios, and its record with kernels of PyTorch's."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.baselines import Alternative
from benchmarks.cases import Case, Data, Setting, Shape, make_data
from benchmarks.cases.mma import SETTINGS, SHAPES, Tile, case_of, every_case, multiplied, problems, tiles
from benchmarks.cli import main, parser
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.records import (
    CUTLASS,
    GELU,
    LOOP,
    MM,
    NO_FUNCTOR,
    RELU,
    CaseResult,
    Group,
    Measurement,
    Timing,
)
from benchmarks.kinds import Run, mma, mma_points
from benchmarks.kinds.mma_points import Beside
from epigemm._native import build_info
from epigemm.packs import weight_packs
from epigemm.planning import dry_runs
from tests.support import plans

BF16, TF32, FP16, SPLIT = SETTINGS
CPU, H200 = torch.device("cpu"), (90, 132)
NAMES = [str(each) for each in SETTINGS]
SMALL, SMALL_SHAPE = Tile("64x64x64", (0, 3, 6, 0, 8, 1), 49152), Shape(128, 128, 1024)
SYNTHETIC_TREES = {"csrc": "a" * 40, "python": "0123456789" * 4}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_tiles_by_vectors(setting: Setting) -> None:
    found = tiles(setting, gpu=H200)
    kind = {TF32: "tf32", SPLIT: "split"}.get(setting, "16_bits")
    count = plans.FAMILIES[plans.MMA][kind]
    assert [tile.number for tile in found] == list(
        range(count - 2 if kind == "16_bits" else count)
    )  # by vectors
    for tile in found:
        assert dry_runs.ARITHMETICS[tile.plan[0]] == multiplied(setting)
        assert list(tile.plan[1:]) == plans.numbers(plans.MMA, tile.number, 0, 8)


def test_a_gpu_with_less_shared_memory_has_fewer() -> None:
    assert [tile.number for tile in tiles(BF16, gpu=(86, 84))] == [2, 3, 4, 5, 6, 7]


def test_waves() -> None:
    tile = tiles(BF16, gpu=H200)[0]
    assert tile.text == "128x256x64" and tile.waves(Shape(8192, 3072, 1024), 132) == 64 * 12 / 132
    assert tile.waves(Shape(129, 257, 1024), 2) == 2.0


def test_which_cases() -> None:
    """Of a shape with few tiles, or with a short K, none."""
    large, small = tiles(BF16, gpu=H200)[0], tiles(BF16, gpu=H200)[6]
    at_once = {(BF16, large): 132, (BF16, small): 528}
    cases, left_out = every_case(
        [Shape(8192, 3072, 1024), Shape(4096, 4096, 4096), Shape(8192, 8192, 512)], at_once
    )
    names = [case.name for case in cases]
    assert names == [
        f"mma/{tile} bf16".replace("@", "8192x3072x1024") for tile in ("128x256x64 @", "64x64x64 @")
    ] + ["mma/64x64x64 4096x4096x4096 bf16"]
    assert left_out == {
        "mma/128x256x64 4096x4096x4096 bf16": "3.88 waves, fewer than 4",
        "mma/128x256x64 8192x8192x512 bf16": "K is below 1024",
        "mma/64x64x64 8192x8192x512 bf16": "K is below 1024",
    }


def test_every_shape_has_four_waves_of_the_largest_tiles_on_an_h200() -> None:
    at_once = {(setting, tile): 132 for setting in SETTINGS for tile in tiles(setting, gpu=H200)}
    cases, left_out = every_case([], at_once)
    assert not left_out and len(cases) == len(SHAPES) * len(at_once)
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("shape", [Shape(64, 64), Shape(64, 64, 1024)], ids=str)
def test_sizes_that_are_refused(shape: Shape) -> None:
    with pytest.raises(ValueError, match="--sizes"):
        every_case([shape], {(BF16, SMALL): 132})


@pytest.mark.parametrize(
    "arguments",
    [[], ["--dtypes", "bf16"], ["--peers", "mm"], ["--random", "1"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also on a CPU."""
    assert main(["--mma", *arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks: --")


# --- bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", problems())
def test_each_epilogue_has_its_own_bound(name: str, setting: Setting) -> None:
    """Its result is within it, and those of the others are not."""
    case = case_of(SMALL_SHAPE, setting, SMALL, 1)
    data = make_data(case, CPU, 0)
    data.refill(signed=True, seed=1)
    in_double = data.parameters.columns(slice(None), torch.float64)
    reference = Reference(case, data, 0)
    for other, problem in problems().items():
        assert data.weight is not None
        z = problem.eager(data.x.double(), data.weight.double(), in_double)
        assert reference.under(problems()[name]).compare(z.to(data.x.dtype), 0).ok == (other == name)


# --- ratios -------------------------------------------------------------------------------------------------------


def result(tile: str, shape: Shape, **ms: float) -> CaseResult:
    found = CaseResult.of(case_of(shape, BF16, dataclasses.replace(SMALL, text=tile), 1))
    found.groups.append(
        Group("main", [Measurement(name, name, in_turn=Timing.of([at])) for name, at in ms.items()])
    )
    return found


def figures(results: Sequence[CaseResult], loop_flops: float = 0.5) -> dict[str, Any]:
    return mma_points.figures(
        results, {each.case: Beside(5.0, round(loop_flops * each.flops)) for each in results}
    )


def test_ratios() -> None:
    shape = Shape(2048, 2048, 2048)
    ms = {NO_FUNCTOR: 1.0, RELU: 1.25, GELU: 2.0, LOOP: 0.5, MM: 0.75, CUTLASS: 1.1}
    found = figures([result("64x64x64", shape, **ms)], loop_flops=1.0)
    (point,) = found["cases"].values()
    assert (point[RELU], point[GELU]) == (0.8, 0.5)
    assert [point[f"{name}_of_loop"] for name in (NO_FUNCTOR, RELU, GELU)] == [0.5, 0.4, 0.25]
    assert (point["vs_mm"], point["vs_cutlass"]) == (0.75, 1.1)
    assert point["tflops"][NO_FUNCTOR] == round(2 * 2048**3 / 1e9, 1) == point["tflops"][LOOP] / 2
    assert found["tiles"]["bf16 64x64x64"][RELU] == {
        "geomean": pytest.approx(0.8),
        "worst": 0.8,
        "worst_at": "64x64x64 at 2048x2048x2048",
        "points": 1,
    }
    assert found["arithmetics"]["bf16"]["vs_cutlass"]["geomean"] == pytest.approx(1.1)


def test_what_is_missed() -> None:
    """A functor at a point; the loop by the best tile of a shape; CUTLASS in geomean."""
    large, small = Shape(4096, 4096, 4096), Shape(2048, 2048, 2048)
    fine = {NO_FUNCTOR: 1.0, RELU: 1.0, GELU: 1.02, LOOP: 0.45, MM: 1.0, CUTLASS: 1.0}
    results = [result("128x256x64", large, **fine), result("64x64x64", large, **fine | {LOOP: 0.1})]
    assert figures(results)["missed"] == []
    slow = [result("128x256x64", small, **fine | {GELU: 1.25, LOOP: 0.41, CUTLASS: 0.9})]
    assert figures([*results, *slow])["missed"] == [
        "bf16 128x256x64: bias_gelu is below 0.97 of the kernel without a functor at 1 of 2 shapes, "
        "0.800 at 2048x2048x2048",
        "bf16 2048x2048x2048: bias_gelu reaches 0.656 of the bare loop with the best tile, 128x256x64, wanted 0.8",
        "bf16: vs_cutlass is 0.965 in geomean, wanted 0.99",
    ]


def test_three_products() -> None:
    """Of the loop each counts. The whole call is held against a third of the rate of fp16's best tile."""
    shape, found = Shape(2048, 2048, 2048), []
    for setting, tile, ms in (
        (FP16, "64x64x64", 2.0),
        (FP16, "128x256x64", 1.0),
        (SPLIT, "128x128x32", 3.75),
    ):
        each = CaseResult.of(case_of(shape, setting, dataclasses.replace(SMALL, text=tile), 1))
        timings = [(NO_FUNCTOR, ms), (LOOP, ms / 2)]
        measured = [Measurement(name, name, in_turn=Timing.of([at])) for name, at in timings]
        each.groups.append(Group("main", measured))
        found.append(each)
    beside = {each.case: Beside(5.0, (3 if each is found[-1] else 1) * each.flops) for each in found}
    beside[found[-1].case] = dataclasses.replace(beside[found[-1].case], products=3)
    summary = mma_points.figures(found, beside)
    assert summary["of_third"] == {"2048x2048x2048": pytest.approx(0.8)}
    assert summary["missed"] == ["fp16x3 2048x2048x2048: 0.800 of a third of fp16's rate, wanted 0.85"]
    assert summary["cases"][found[-1].case][f"{NO_FUNCTOR}_of_loop"] == 0.5


def test_a_point_without_times() -> None:
    """It is there, without ratios."""
    found = figures([result("64x64x64", Shape(2048, 2048, 2048), **{RELU: 1.0})])
    (point,) = found["cases"].values()
    assert point["ms"] == {RELU: 1.0} and RELU not in point and not found["missed"]
    assert len(mma_points.tables(found)) == 2


# --- the record ---------------------------------------------------------------------------------------------------


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operators for the kernels, and a loop that does nothing."""

    def forced_into(
        out: Tensor,
        epilogue: str,
        x: Tensor,
        weight: Tensor,
        arithmetic: str,
        *,
        bias: Tensor | None,
        plan: Sequence[int],
        pack: Tensor | None = None,
    ) -> Tensor:
        assert (pack is not None) == (arithmetic == "split")
        assert (bias is None) == (epilogue == NO_FUNCTOR) and list(plan) == plans.numbers(plans.MMA, 6, 0, 8)
        z = x.float() @ weight.float().t()
        if bias is not None:
            z += bias.float()
        after = {NO_FUNCTOR: torch.clone, RELU: torch.relu, GELU: torch.nn.functional.gelu}
        return out.copy_(after[epilogue](z))

    monkeypatch.setattr(mma, "forced_into", forced_into)
    monkeypatch.setattr(weight_packs, "keep", lambda weight, slices: Namespace(buffer=torch.empty(slices)))
    monkeypatch.setattr(mma.Loop, "_run", lambda self, steps, is_tf32: steps << (9 - is_tf32))


@pytest.mark.parametrize(
    ("gpu", "name"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")]
)
def test_the_records_folder(gpu: str, name: str, tmp_path: Path) -> None:
    about = {"gpu": {"name": gpu}}
    assert mma.folder(tmp_path, about) == tmp_path / f"sm80-on-{name}"
    assert mma.folder(None, about) == Path("benchmarks", "results", f"nvidia-{name}", f"sm80-on-{name}")


def run_of(tmp_path: Path, *arguments: str) -> Run:
    options: Namespace = parser().parse_args(
        ["--mma", "--quick", "--sizes", str(SMALL_SHAPE), "--output", str(tmp_path), *arguments]
    )
    about: dict[str, Any] = {
        "device": "cpu",
        "gpu": None,
        "cpu": {"name": "any", "threads": 1},
        "torch": torch.__version__,
    }
    about |= {"trees": SYNTHETIC_TREES, "packages": {}, "epigemm": build_info(), "command": ["python"]}
    return Run(options, CPU, about)


@pytest.mark.usefixtures("replaced")
def test_the_record(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    bench = run.bench(of=mma.MmaBench, pause_s=None)
    at_once = {(setting, SMALL): 1 for setting in SETTINGS}
    assert mma.measure(run, bench, at_once, {}) == 0
    summary = json.loads((tmp_path / "sm80-on-cpu" / "summary.json").read_text())
    assert set(summary["cases"]) == {f"mma/64x64x64 {SMALL_SHAPE} {s}" for s in NAMES}
    for point in summary["cases"].values():
        assert set(point["ms"]) == {NO_FUNCTOR, RELU, GELU, LOOP, MM} and point["waves"] == 4
    assert summary["absent"] == {CUTLASS: "needs a GPU"} and not summary["wrong"]
    assert summary["ctas_at_once"] == {f"{s} 64x64x64": 1 for s in NAMES}
    assert [*summary["of_third"]] == [str(SMALL_SHAPE)]


@pytest.mark.usefixtures("replaced")
def test_a_wrong_result_and_a_kernel_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends the run with 1, and the wrong one has no time."""
    run = run_of(tmp_path, "--cases", "bf16")
    bench = run.bench(of=mma.MmaBench, pause_s=None)
    at_once = {(BF16, SMALL): 1}
    assert mma.measure(run, bench, at_once, {"bf16 16x64x64": "RuntimeError: no such kernel"}) == 1
    right = mma.kernel

    def wrong(epilogue: str, case: Case, data: Data, out: Tensor) -> Alternative:
        found = right(epilogue, case, data, out)
        return Alternative(lambda: found.run().mul_(1.0 + 0.1 * (epilogue == RELU)), 0)

    monkeypatch.setattr(mma, "kernel", wrong)
    assert mma.measure(run, bench, at_once, {}) == 1
    summary = json.loads((tmp_path / "sm80-on-cpu" / "summary.json").read_text())
    (why,) = summary["wrong"].values()
    assert "relu(z + bias)" in why and "gelu" not in why
    (point,) = summary["cases"].values()
    assert RELU not in point["ms"] and {NO_FUNCTOR, GELU} <= set(point["ms"])


@pytest.mark.usefixtures("replaced")
def test_the_loop_is_about_as_long_as_a_product() -> None:
    loop = mma.Loop(CPU)
    for is_tf32 in (False, True):
        flops = loop.flops(1 << 30, is_tf32)
        assert flops == loop.steps(1 << 30, is_tf32) * (256 if is_tf32 else 512)
        assert flops == pytest.approx((1 << 30) / 0.75, rel=1e-4)


def test_a_build_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile says so."""
    monkeypatch.setattr("benchmarks.kinds.mma.cubins.ir_path", lambda symbol: None)
    monkeypatch.setattr("benchmarks.kinds.mma.tiles", lambda setting, device: tiles(setting, gpu=H200))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found, failed = mma.occupancy(Run(Namespace(), CPU, {"gpu": {"multiprocessors": 132}}))
    assert not found and len(failed) == 8 + 3 + 8 + 2
    assert (
        failed["fp32 high 64x64x32"] == "RuntimeError: this build has no kernel epigemm_open_sm80_mma_tf32_2"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_on_a_gpu(setting: Setting, tmp_path: Path) -> None:
    """The smallest tile, which has waves enough at a small size."""
    tile = tiles(setting, device=0)[6 if setting in (BF16, FP16) else -1]
    size = "4096x4096x1024"
    command = ["--mma", "--quick", "--sizes", size, "--cases", f"mma/{tile.text} {size} {setting}"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("sm80-on-*/summary.json")
    summary = json.loads(path.read_text())
    (point,) = summary["cases"].values()
    assert {NO_FUNCTOR, RELU, GELU, LOOP, MM} <= set(point["ms"]) and point["waves"] >= 4
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert all(count % multiprocessors == 0 for count in summary["ctas_at_once"].values())
    if torch.cuda.get_device_capability() == (9, 0):  # by shared memory, of which it has 228 KB
        assert summary["ctas_at_once"].get("bf16 128x256x64") == multiprocessors
        assert summary["ctas_at_once"].get("bf16 64x64x64") in (3 * multiprocessors, 4 * multiprocessors)
    for name in (NO_FUNCTOR, RELU, GELU):
        assert 0.1 < point[f"{name}_of_loop"] < 1.1
