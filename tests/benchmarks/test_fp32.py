"""fp32 products on fp16 pieces in the benchmark: our two rows, the bar, memory, tables, and the sweep over plans."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

import epigemm
from benchmarks import cases, peers, pieces, plan_kernels, plans, plots, report, tables
from benchmarks.cases import Case, Data, Problem, Setting, Shape
from benchmarks.cli import main
from benchmarks.records import (
    EAGER,
    FP16_PRODUCT,
    MAX_AUTOTUNE,
    OURS,
    PASS,
    PLAIN,
    TRITON,
    Accuracy,
    CaseResult,
    Group,
    Measurement,
    Memory,
    PlanSweep,
    Timing,
)
from epigemm import keeping, packs
from epigemm.calls import LinearCall
from epigemm.timing import Effort, Run
from tests.support.cases import fused_unavailable

CPU = torch.device("cpu")
HIGHEST, HIGH = Setting("fp32", "highest"), Setting("fp32", "high")
LINEAR = [problem for problem in cases.all_problems() if problem.kind == "linear"]


def alternative(name: str, case: Case, data: Data, out: torch.Tensor) -> peers.Alternative:
    peer = next(peer for peer in peers.all_peers() if peer.name == name)
    return peer.prepare(case, data, out)


@pytest.mark.parametrize("name", [OURS, PLAIN])
@pytest.mark.parametrize("problem", LINEAR, ids=lambda problem: problem.name)
def test_both_of_our_rows_compute_what_eager_computes(problem: Problem, name: str) -> None:
    """BatchNorm's running statistics and counter included."""
    case = Case(problem, Shape(24, 16, 40), HIGHEST)
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for who in (name, EAGER):
        data = cases.make_data(case, CPU, seed=3)
        out = torch.full((24, 16), float("nan"))
        with torch.no_grad():
            result = alternative(who, case, data, out).run()
        found.append((result, data.parameters.vectors))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    for vector, expected in zip(found[0][1].values(), found[1][1].values(), strict=True):
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)


def test_our_row_on_fp32_is_a_module_that_owns_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a call that says so may keep the pieces; the other row must not find them."""
    asked: list[tuple[str, int]] = []
    linear = epigemm.entry.linear

    def spy(*args: Any) -> torch.Tensor | epigemm.entry.Recorded | None:
        weight, pack_use = args[2], args[8]
        found = linear(*args)
        if found is not None:  # else the cold path is asked
            asked.append((pack_use or keeping.pack_use(weight), id(weight)))
        return found

    def spy_on_the_cold_path(call: LinearCall) -> torch.Tensor:
        asked.append((call.pack_use, id(call.weight)))
        result: torch.Tensor = forward(call)
        return result

    forward = epigemm.execution._linear
    monkeypatch.setattr("epigemm.entry.linear", spy)
    monkeypatch.setattr("epigemm.execution._linear", spy_on_the_cold_path)
    for problem in LINEAR:
        case = Case(problem, Shape(8, 16, 40), HIGHEST)
        data, out = cases.make_data(case, CPU, seed=0), torch.empty(8, 16)
        asked.clear()
        with torch.no_grad():
            alternative(OURS, case, data, out).run()
            alternative(PLAIN, case, data, out).run()
        (use, module_weight), (plain_use, plain_weight) = asked
        assert (use, plain_use) == (packs.KEEP, packs.FIND), problem.name
        assert plain_weight == id(data.weight) != module_weight


def test_yardsticks_have_the_size_of_the_case() -> None:
    case = Case(LINEAR[0], Shape(8, 16, 40), HIGHEST)
    data, out = cases.make_data(case, CPU, seed=0), torch.empty(8, 16)
    assert data.weight is not None
    product = alternative(FP16_PRODUCT, case, data, out)
    assert not product.checked and product.run().dtype == torch.float16
    torch.testing.assert_close(product.run().float(), data.x @ data.weight.t(), rtol=2e-2, atol=2e-2)
    copied = alternative(PASS, case, data, out)
    assert not copied.checked and torch.equal(copied.run(), data.x) and copied.run() is not data.x


def test_what_our_rows_and_the_yardsticks_apply_to() -> None:
    by_name = {peer.name: peer for peer in peers.all_peers()}
    cuda = torch.device("cuda")
    bf16 = Case(LINEAR[0], Shape(8, 16, 40), Setting("bf16", "highest"))
    elementwise = Case(cases.all_problems()[-1], Shape(8, 16), HIGHEST)
    for name in (PLAIN, FP16_PRODUCT, PASS):
        for setting in (HIGHEST, HIGH):
            assert by_name[name].applies(Case(LINEAR[0], Shape(8, 16, 40), setting), cuda) == ""
        assert by_name[name].applies(bf16, cuda) and by_name[name].applies(elementwise, cuda)
        assert "GPU" in by_name[name].applies(Case(LINEAR[0], Shape(8, 16, 40), HIGHEST), CPU)


def timing(ms: float) -> Timing:
    return Timing.of([ms])


def measurement(name: str, ms: float, alone_ms: float | None = None) -> Measurement:
    alone = None if alone_ms is None else timing(alone_ms)
    return Measurement(name, name, in_turn=timing(ms), alone=alone)


def test_the_bar() -> None:
    """(3 x the fp16 product + one pass over x) / 0.95; one product at "high"."""
    ours = measurement(OURS, 0.6, 0.5)
    group = Group("main", [ours, measurement(FP16_PRODUCT, 0.18, 0.16), measurement(PASS, 0.03, 0.02)])
    assert group.bar(3) == pytest.approx((3 * 0.18 + 0.03) / 0.95)
    assert group.bar(3, alone=True) == pytest.approx((3 * 0.16 + 0.02) / 0.95)
    assert group.bar(1) == pytest.approx((0.18 + 0.03) / 0.95)
    assert group.times_bar(ours, 3) == pytest.approx(0.6 * 0.95 / 0.57)
    assert group.times_bar(ours, 3, alone=True) == pytest.approx(0.5 * 0.95 / 0.5)
    assert group.bar(0) is None
    assert Group("main", group.measurements[:2]).bar(3) is None
    assert Group("main", [ours]).times_bar(ours, 3) is None


def result_of(m: int, ours_ms: float, eager_ms: float, precision: str = "highest") -> CaseResult:
    case = Case(LINEAR[0], Shape(m, 64, 128), Setting("fp32", precision))
    main_group = Group(
        "main",
        [
            measurement(OURS, ours_ms, ours_ms / 2),
            measurement(PLAIN, 2 * ours_ms, ours_ms),
            measurement(EAGER, eager_ms, eager_ms / 2),
            measurement(FP16_PRODUCT, ours_ms / 4, ours_ms / 10),
            measurement(PASS, ours_ms / 8, ours_ms / 10),
            measurement(TRITON, 2.5 * ours_ms),
        ],
    )
    main_group.measurements[0].memory = Memory(3_000_000, 2_500_000, 1_250_000, 2_400_000, 1_250_000)
    # Measured again in another group at other clocks: ratios must not mix the two.
    slow = Group(
        "slow",
        [measurement(OURS, 10 * ours_ms, 5 * ours_ms), measurement(MAX_AUTOTUNE, 44 * ours_ms, 21 * ours_ms)],
    )
    return CaseResult(
        case=case.name,
        problem=case.problem.name,
        models=(),
        formula=case.problem.formula.formula,
        shape=(m, 64, 128),
        dtype="fp32",
        precision=precision,
        training=False,
        flops=case.flops,
        bytes=case.bytes,
        fp16_products=3 if precision == "highest" else 1,
        plan={"fused": True, "arithmetic": "split", "tile": "128x128x64", "cluster": "2x1"},
        plan_plain={"fused": False, "why_not": "slower"},
        groups=[main_group, slow],
    )


@pytest.fixture
def record() -> dict[str, Any]:
    """As a GPU would give it: three sizes of one problem, the smallest behind eager."""
    environment = json.loads(json.dumps(_ENVIRONMENT))
    run = report.Run(
        environment, {}, results=[result_of(1, 1.0, 0.9), result_of(64, 1.0, 2.0), result_of(512, 1.0, 4.0)]
    )
    return report.to_record(run)


_ENVIRONMENT = {
    "device": "cuda",
    "gpu": {"name": "a GPU", "capability": "9.0", "driver": "1", "cuda": "13.0"},
    "cpu": {"name": "a CPU", "threads": 1},
    "torch": "2",
    "epigemm": {"version": "0"},
}


def test_record_has_the_bar_and_what_it_is_made_from(record: dict[str, Any]) -> None:
    main_group = record["cases"][2]["groups"][0]
    by_name = {m["alternative"]: m for m in main_group["measurements"]}
    assert main_group["bar_ms"]["in_turn"] == pytest.approx((3 * 0.25 + 0.125) / 0.95)
    assert by_name[OURS]["in_turn"]["times_bar"] == pytest.approx(0.95 / 0.875)
    assert by_name[OURS]["alone"]["times_bar"] == pytest.approx(0.5 * 0.95 / 0.4)
    assert by_name[PLAIN]["in_turn"]["times_bar"] == pytest.approx(2 * 0.95 / 0.875)
    assert "times_bar" not in by_name[EAGER]["in_turn"]
    assert "times_faster_than_eager" not in by_name[FP16_PRODUCT]["in_turn"]
    slow = {m["alternative"]: m for m in record["cases"][2]["groups"][1]["measurements"]}
    assert slow[OURS]["in_turn"]["times_faster_than_max_autotune"] == pytest.approx(4.4)
    assert slow[OURS]["alone"]["times_faster_than_max_autotune"] == pytest.approx(4.2)
    assert by_name[OURS]["memory"]["asked"] == 2_500_000


def test_tables_keep_in_turn_and_alone_apart(record: dict[str, Any]) -> None:
    in_turn, alone = tables.fp32_speed(record, tables.IN_TURN), tables.fp32_speed(record, tables.ALONE)
    assert in_turn is not None and alone is not None
    path = "split 128x128x64 2x1"
    assert in_turn.rows[2][1:] == ["1", "4.00", "4.40", "2.50", "1.086", "87.5%", "2", "2.00", path]
    assert alone.rows[2][1:] == ["0.5", "4.00", "4.20", "", "1.188", "80.0%", "1", "2.00", path]
    assert "in turn" in in_turn.title and "alone" in alone.title


def test_a_sweep_over_m_names_the_size_where_we_are_least_ahead(record: dict[str, Any]) -> None:
    (table,) = tables.over_m(record)
    assert "at least 0.900 x eager (M = 1)" in table.title
    assert [row[0] for row in table.rows] == ["1", "64", "512"]
    assert table.rows[0][3] == "0.900 (0.900)"


def test_markdown_and_plots(record: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "bench.md"
    tables.write_markdown(record, "where", target)
    text = target.read_text()
    for title in ("# where", "in turn", "each alone after a pause", "Memory of a call", "0.900 x eager"):
        assert title in text
    table_lines = [line for line in text.splitlines() if line.startswith("|")]
    assert table_lines and "1.250" in text
    written = {path.name for path in plots.write_plots(record, tmp_path)}
    assert "ceiling-fp32.png" in written
    assert any(name.startswith("speedup-linear_") and name.endswith("n64-k128.png") for name in written)


def test_the_ceiling_of_fp32_is_a_third_of_fp16(record: dict[str, Any]) -> None:
    record["ceilings"] = [{"name": "fp16", "value": 750.0, "unit": "TFLOP/s"}]
    highest, high = record["cases"][0], copy.deepcopy(record["cases"][0])
    high |= {"precision": "high", "fp16_products": 1}
    assert plots._ceiling(record, highest) == (250.0, "250 TFLOP/s (fp16 / 3)")
    assert plots._ceiling(record, high) == (750.0, "750 TFLOP/s")


def test_a_wrong_result_of_the_plain_row_fails_the_case() -> None:
    result = result_of(1, 1.0, 1.0)
    assert result.failed() == []
    plain = result.groups[0].measurements[1]
    plain.accuracy["signed"] = Accuracy(False, 1, 2.0, 1.0, 0.5, 0.1, 64)
    assert result.failed() == [plain]


def test_our_plain_row_and_the_yardsticks_are_no_peers() -> None:
    result = result_of(1, 1.0, 3.0)
    best = report.best_peer(result)
    assert best is not None and best[1].alternative == TRITON and best[0] == pytest.approx(2.5)


def test_the_selection_for_fp32() -> None:
    chosen = cases.fp32_cases([HIGHEST, HIGH])
    assert len({case.name for case in chosen}) == len(chosen)
    assert {case.setting for case in chosen} == {HIGHEST, HIGH}
    bias_relu = {str(case.shape) for case in chosen if case.problem.name == "linear/bias_relu"}
    assert bias_relu == {
        "1024x8192x8192",
        "16384x4096x4096",
        "4096x4096x4096",
        "8192x8192x8192",
        "256x8192x8192",
        "128x8192x8192",
        "16x8192x8192",
    }
    assert {case.problem.name for case in chosen} == {problem.name for problem in LINEAR}
    trained = {case.models for case in chosen if case.problem.training}
    assert trained == {("2/33",), ("2/39",)}


@pytest.mark.parametrize("more", [["--cases", "linear/bias"], ["--sizes", "8x8x8"], ["--sweep-m", "4"]])
def test_the_selection_for_fp32_takes_no_other(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--fp32", "--list", *more]) == 2
    assert "--fp32" in capsys.readouterr().err


def test_bytes_by_the_layout() -> None:
    """100 rows: 2 x 512 for roots and facts; K = 72 is padded to 128 (two pieces) or stays 72 (one)."""
    shape = Shape(100, 10, 72)
    highest, high = Case(LINEAR[0], shape, HIGHEST), Case(LINEAR[0], shape, HIGH)
    x, weight = 2 * 512 + 2 * 2 * 100 * 128, 2 * 256 + 2 * 2 * 10 * 128
    assert pieces.workspace_bytes(highest, packed=True) == x
    assert pieces.workspace_bytes(highest, packed=False) == x + weight
    assert pieces.kept_bytes(highest) == weight
    assert pieces.kept_bytes(high) == 2 * 256 + 1536  # 10 rows of 144 bytes, in whole sections of 256
    for case in (highest, high):
        assert pieces.kept_bytes(case) == packs.pack_bytes(10, 72, packs.PIECES[case.setting.pieces])


@pytest.mark.parametrize("arithmetic", ["split", "scaled"])
def test_every_tile_is_described(arithmetic: str) -> None:
    tiles = pieces.describe_tiles("bias_relu", arithmetic)
    count = epigemm.build_info()["families"]["sm90_fp16x3"][arithmetic]
    numbers = [tuple(tile["plan"][:2]) for tile in tiles]  # a tile may be there in several orders
    assert numbers == sorted(numbers) and set(numbers) == {(2, index) for index in range(count)}
    assert {tile["family"] for tile in tiles} == {"sm90_fp16x3"}
    assert all(tile["tile"] and tile["cluster"] and tile["schedule"] for tile in tiles)


def fake_family(case: Case, data: Data, out: torch.Tensor) -> plan_kernels.Family:
    """Plans computed by PyTorch: tile 0 is right, tile 1 forgets the bias, tile 2 cannot be launched."""
    assert data.weight is not None
    weight, bias = data.weight, data.parameters.vectors["bias"]
    about = {"family": "sm90_fp16x3", "cluster": "1x1", "schedule": "s"}
    tiles = [{**about, "tile": f"t{i}", "plan": [2, i, 0, 1, 1]} for i in range(3)]
    candidate = {**about, "tile": "t0", "plan": [2, 0, 1, 4, 1], "raster": "along_n", "swizzle": 4}
    plan = {"fused": True, "why_not": "", **candidate, "candidates": [candidate | {"predicted_us": 7.0}]}

    def bind(numbers: Any) -> Run:
        def run() -> torch.Tensor:
            tile = numbers[1] if numbers else 0
            if tile == 2:
                raise RuntimeError("does not fit\nat all")
            z = data.x @ weight.t()
            return out.copy_(torch.relu(z if tile == 1 else z + bias))

        return run

    return plan_kernels.Family("split", plan, tiles, bind, lambda: data.x)


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> Callable[[], PlanSweep]:
    monkeypatch.setattr(plans, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(plans, "families", lambda *arguments: [fake_family(*arguments)])

    def run() -> PlanSweep:
        problem = next(p for p in LINEAR if p.name == "linear/bias_relu")
        (found,) = plans.sweep(Case(problem, Shape(8, 16, 24), HIGHEST), CPU, Effort(rounds=2, min_ms=0.0))
        return found

    return run


def test_a_sweep_over_plans(swept: Callable[[], PlanSweep], capsys: pytest.CaptureFixture[str]) -> None:
    found = swept()
    plans_of_a_tile = 8  # two raster orders, four swizzles
    assert [p.tile_index for p in found.plans] == [0] * plans_of_a_tile + [1] * plans_of_a_tile
    assert [p.accuracy.ok for p in found.plans] == [True] * plans_of_a_tile + [False] * plans_of_a_tile
    assert len(found.refused) == plans_of_a_tile and set(found.refused.values()) == {"does not fit"}
    assert found.failed and found.arithmetic == "split"
    assert found.mm is not None and found.dispatched is not None and found.split_x is not None
    (dispatched,) = (p for p in found.plans if p.dispatched)
    assert (dispatched.tile, dispatched.raster, dispatched.swizzle) == ("t0", "along_n", 4)
    assert dispatched.predicted_us == 7.0
    assert sum(p.predicted_us is not None for p in found.plans) == 1
    record = report.with_plans({"cases": []}, [found], complete=True)
    table = tables.plans(record)
    assert (
        table is not None and table.rows[0][1] == "split" and table.rows[0][2].startswith("t0 1x1 s along_")
    )
    console = report.Console()
    plans.show(console, found)
    plans.summarise(console, [found], table)
    text = capsys.readouterr().out
    assert "refused: does not fit" in text and "WRONG" in text and "x's split" in text


def test_a_case_that_cannot_be_prepared_does_not_end_the_sweep(
    swept: Callable[[], PlanSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(plans, "families", no_memory)
    assert swept().failed and swept().refused == {"all": "no memory"}


def test_plans_without_a_gpu(tmp_path: Path) -> None:
    sizes = ["--sizes", "8x16x24", "--output", str(tmp_path)]
    assert (
        main(["--device", "cpu", "--plans", "--dtypes", "fp32", "--precision", "highest", "high", *sizes])
        == 0
    )
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["complete"] is True
    assert [sweep["arithmetic"] for sweep in record["plans"]] == ["split", "scaled"]
    assert all("GPU" in sweep["why_not"] and sweep["plans"] == [] for sweep in record["plans"])


# --- On a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := fused_unavailable():
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("fp32")
    command = ["--quick", "--cases", "linear/*", "--sizes", "2048x1024x1024", "--dtypes", "fp32"]
    command += ["--peers", PLAIN, EAGER, FP16_PRODUCT, PASS, "--output", str(path)]
    assert main(command) == 0
    record: dict[str, Any] = json.loads((path / "bench.json").read_text())
    return record


@pytest.mark.gpu
def test_fp32_is_measured_against_the_bar(gpu_record: dict[str, Any]) -> None:
    for case in gpu_record["cases"]:
        (group,) = case["groups"]
        assert group["bar_ms"]["in_turn"] > 0 and group["bar_ms"]["alone"] is None
        names = {m["alternative"] for m in group["measurements"]}
        assert names == {OURS, PLAIN, EAGER, FP16_PRODUCT, PASS}
        assert all(m["ok"] for m in group["measurements"])
    assert {case["plan"]["arithmetic"] for case in gpu_record["cases"] if case["precision"] == "highest"} == {
        "split"
    }


@pytest.mark.gpu
def test_memory_is_as_predicted(gpu_record: dict[str, Any]) -> None:
    """Exactly, where nothing but pieces is needed; the bias alone is such a case."""
    seen = 0
    for case in gpu_record["cases"]:
        for m in case["groups"][0]["measurements"]:
            if not m["memory"]:
                continue
            memory = m["memory"]
            assert memory["peak"] >= memory["asked"] >= (memory["predicted"] or 0)
            if memory["predicted_kept"] is not None:
                assert memory["kept"] == memory["predicted_kept"]
            if "relu" in case["problem"] and memory["predicted"] is not None:
                assert memory["asked"] == memory["predicted"]
                seen += 1
    assert seen


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_every_plan_on_pieces_is_right(precision: str, tmp_path: Path) -> None:
    if reason := fused_unavailable():
        pytest.skip(reason)
    command = ["--plans", "--dtypes", "fp32", "--precision", precision, "--sizes", "384x512x256"]
    assert main([*command, "--rounds", "2", "--output", str(tmp_path)]) == 0
    (sweep,) = (
        s
        for s in json.loads((tmp_path / "bench.json").read_text())["plans"]
        if s["arithmetic"] in packs.PIECES
    )
    arithmetic = sweep["arithmetic"]
    assert {p["tile_index"] for p in sweep["plans"]} == set(
        range(epigemm.build_info()["families"]["sm90_fp16x3"][arithmetic])
    )
    assert sweep["split_x"]["median_ms"] > 0
