"""Random launches: what is drawn, where tensors lie, that wrong results are found, and that hangs are reported."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import Shape
from epigemm.arguments import precision
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import named
from epigemm.planner import dry_runs
from epigemm.planner.gpus import KNOWN
from epigemm.tuner.tuner import ONE_ORDER
from tools import launches, random_launches
from tools.launches import PROBLEMS, Launch, Layout, Outcome
from tools.random_launches import Worker
from tools.run_every_kernel import divides_k, family_number, kernels

CPU = torch.device("cpu")
TREES = f"csrc={'a' * 40},python={'b' * 40}"
DRAWN = [launches.draw(0, number) for number in range(2000)]

# --- the drawing ------------------------------------------------------------------------------------------------------


def test_sides_are_ragged_and_bounded() -> None:
    for side in "mnk":
        found = [getattr(launch.shape, side) for launch in DRAWN]
        assert min(found) < 10 and 4000 < max(found) <= 4096
        assert sum(size % 8 > 0 for size in found) > 300
    assert all(max(launches.draw(0, i, 50).shape.m, 1) <= 50 for i in range(100))


@pytest.mark.parametrize("arithmetic", launches.SETTINGS)
def test_every_kernel_can_be_forced(arithmetic: str) -> None:
    counted = {"bf16": "16_bits", "fp16": "16_bits"}.get(arithmetic, arithmetic)
    every = kernels(counted)
    plans = [
        replace(DRAWN[0], arithmetic=arithmetic, kernel=(place + 0.5) / len(every), order=(1, 3, 2)).plan()
        for place in range(len(every))
    ]
    assert [plan and plan[:2] for plan in plans] == every
    of_one_order = [family_number(each) for each in ONE_ORDER]
    for plan in plans:
        assert plan is not None
        splits = 4 if divides_k(plan[0], plan[1], counted) else 1
        assert plan[2:] == ((0, 1, 4) if plan[0] in of_one_order else (1, 8, splits))
    assert replace(DRAWN[0], kernel=None).plan() is None


# --- where tensors lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (4, 1), (6,)])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(1), Layout(0, 5), Layout(24, 1, True), Layout(2, 0, True)]
)
def test_a_tensor_lies_among_nan(layout: Layout, shape: tuple[int, ...]) -> None:
    value = torch.rand(shape)
    memory = layout.memory(value)
    view = layout.view(memory, shape)
    view.copy_(value)
    assert torch.equal(view, value) and view.storage_offset() == layout.offset
    assert int((~memory.isnan()).sum()) == value.numel()
    assert torch.equal(layout.placed(value), value)


# --- a launch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_launch_of_each_epilogue_on_the_cpu(name: str) -> None:
    layouts = (Layout(1, 3), Layout(0, 1, True), Layout(2, 5), *(Layout(1, i) for i in range(9)))
    count = 3 + len(PROBLEMS[name].operands)
    for arithmetic in launches.SETTINGS:
        launch = Launch(0, 1, name, Shape(9, 13, 21), arithmetic, 0.5, (0, 0, 0), layouts[:count])
        assert launches.run(launch, CPU) == Outcome()


def test_what_is_forced_fits() -> None:
    """Every kernel that is not refused takes the tensors of its launch: a dry run tells, of an H200."""
    ended: list[tuple[str, int]] = []
    every = [launches.draw(0, number, 40) for number in range(400)]
    for launch in every:
        data, plan = launches.placed(launch, CPU), launch.plan()
        found = plan and launches.native(launch.case.problem, data.parameters)
        if not plan or not found or data.weight is None:
            continue
        name, bias, operands, scalars = found
        epilogue, out = named(name), torch.empty(launch.shape.m, launch.shape.n, dtype=data.x.dtype)
        assert epilogue is not None
        given = epilogue.in_order(bias, operands, scalars)
        assert given is not None
        arithmetic = precision.IEEE if launch.arithmetic in ("bf16", "fp16") else launch.arithmetic
        run = dry_runs.dry_run(
            LinearCall(epilogue, data.x, data.weight, given, out=launch.layouts[2].placed(out)),
            dry_runs.ALL_KEPT,
            circumstances=dry_runs.ROUTED | dry_runs.OUT_APART | dry_runs.OUT_PADDED,
            plan=(dry_runs.ARITHMETICS.index(arithmetic), *plan),
            gpu=KNOWN["H200"].numbers,
        )
        ended.append((run.refused, run.answer))
    assert {answer for refused, answer in ended if not refused} == {0}
    assert sum(not refused for refused, _ in ended) > len(every) / 4


RELU = Launch(0, 0, "linear/bias_relu", Shape(9, 13, 21), "bf16", None, (0, 0, 0), 4 * (Layout(1, 3),))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda out: out[8, 12].add_(1.0), "elements"),
        (lambda out: out[3, 4].fill_(float("nan")), "NaN or was not written"),
        (lambda out: out.as_strided((1,), (1,), 0).fill_(1.0), "written beside the result"),
        (lambda out: out.as_strided((1,), (1,), 1 + 13).fill_(1.0), "written beside the result"),
        (
            lambda out: out.as_strided((1,), (1,), 1 + 13).view(torch.int16).fill_(0x7FFF),
            "written beside the result",
        ),
    ],
    ids=["a sum", "not written", "ahead", "behind a row", "NaN behind a row"],
)
def test_what_is_wrong_is_seen(spoil: Any, why: str) -> None:
    data, layout, shape = launches.placed(RELU, CPU), RELU.layouts[2], (RELU.shape.m, RELU.shape.n)
    memory = layout.memory(torch.empty(shape, dtype=data.x.dtype))
    out = layout.view(memory, shape)
    launches.planned(RELU.case.problem, data, out)
    spoil(out)
    assert why in launches.why_wrong(RELU, "", data, memory)


# --- the processes ----------------------------------------------------------------------------------------------------


class Scripted(Worker):
    """A process that says what the script says."""

    def __init__(
        self, script: list[Outcome | None], started: list[torch.device], device: torch.device
    ) -> None:
        self.script = script
        started.append(device)

    def launch(self, launch: Launch, limit_s: float) -> Outcome | None:
        return self.script.pop(0)

    def end(self) -> str:
        return ""


def test_what_hangs_is_reported_and_its_process_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    fine, wrong, started = Outcome("a kernel", ""), Outcome(wrong="3 elements"), list[torch.device]()
    script = [fine, None, wrong, fine, Outcome(wrong="CUDA", raised=True), Outcome("", "odd K")]
    found = random_launches.run(DRAWN[:6], CPU, 5.0, None, partial(Scripted, script, started))
    assert [(each["number"], each["why"]) for each in found.failed] == [
        (1, "nothing came of it in 5 s"),
        (2, "3 elements"),
        (4, "CUDA"),
    ]
    assert len(started) == 3 and found.launched == 6
    assert found.kernels == {"a kernel": 2, "planned": 4} and found.refused == {"odd K": 1}
    assert "FAILED: seed 0 number 1: " in capsys.readouterr().out


ABSENT = torch.device("cuda", 99)


def test_where_no_process_starts_nothing_is_launched() -> None:
    """The end of its stderr says why."""
    found = random_launches.run(DRAWN[:3], ABSENT, 5.0, None)
    assert (found.launched, found.left_out, found.failed) == (0, 3, [])
    begin = "no process that launches could start: the process ended with 1\n"
    assert found.stopped.startswith(begin) and "set_device" in found.stopped


def test_a_run_and_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--count", "7", "--largest", "40", "--trees", TREES]
    output = tmp_path / "record.json"
    assert random_launches.main([*command, "--shard", "2/2", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert (record["kind"], record["complete"], record["launched"]) == ("random_launches", True, 3)
    assert record["environment"]["trees"]["csrc"] == "a" * 40
    assert record["environment"]["command"][2] == "tools.random_launches"
    assert {key: record["selection"][key] for key in ("shard", "chosen", "of")} == {
        "shard": "2/2",
        "chosen": 3,
        "of": 7,
    }
    assert record["kernels"] == {"planned": 3} and record["failed"] == []
    assert len(record["never_forced"]) == 120
    assert "3 launches, 0 failed" in capsys.readouterr().out


def test_a_failure_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--only", "5", "--trees", TREES]
    assert random_launches.main([*command, "--limit", "0"]) == 1
    assert "FAILED: seed 0 number 5: " in capsys.readouterr().out


@pytest.mark.gpu
def test_launches_on_a_gpu(tmp_path: Path) -> None:
    """Some of them forced; nothing is wrong, and no plan is malformed. Other tests may use the GPU meanwhile."""
    output = tmp_path / "record.json"
    command = ["--count", "12", "--largest", "512", "--limit", "240", "--trees", TREES]
    status = random_launches.main([*command, "--output", str(output)])
    record = json.loads(output.read_text())
    assert status == 0, record["failed"] or record["stopped"]
    assert record["launched"] == 12 and record["kernels"]
