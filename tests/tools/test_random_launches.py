"""Random launches: what is drawn, where tensors lie, that wrong results are found, and that hangs are reported."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases import Data, Problem, Shape, make_data
from benchmarks.gradings.products import SCALED, SPLIT
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import named
from epigemm.epilogues.registry import EPILOGUES
from epigemm.planner import dry_runs
from epigemm.planner.gpus import KNOWN
from epigemm.tuner.candidates import SWAP_AB
from tools import launches, random_launches
from tools.launches import PROBLEMS, Launch, Layout, Outcome
from tools.random_launches import Found, NotStarted
from tools.run_every_kernel import divides_k, family_number, kernels

CPU = torch.device("cpu")
TREES = f"csrc={'a' * 40},python={'b' * 40}"
DRAWN = [launches.draw(0, number) for number in range(2000)]

# --- the drawing ------------------------------------------------------------------------------------------------------


def test_a_launch_follows_from_seed_and_number_alone() -> None:
    assert launches.draw(0, 77) == DRAWN[77] != replace(launches.draw(1, 77), seed=0)


def test_everything_is_drawn() -> None:
    assert {launch.problem for launch in DRAWN} == set(PROBLEMS)
    assert {launch.arithmetic for launch in DRAWN} == set(launches.SETTINGS)
    assert 0.7 < sum(launch.kernel is not None for launch in DRAWN) / len(DRAWN) < 0.8
    assert {launch.order for launch in DRAWN} == {
        (i, j, k) for i in range(2) for j in range(4) for k in range(4)
    }
    assert {layout.offset for launch in DRAWN for layout in launch.layouts} == {0, 1, 2, 8, 24}
    assert all(len(x.layouts) == 3 + len(PROBLEMS[x.problem].operands) for x in DRAWN)


def test_sides_are_ragged_and_bounded() -> None:
    for side in "mnk":
        found = [getattr(launch.shape, side) for launch in DRAWN]
        assert min(found) < 10 and 4000 < max(found) <= 4096
        assert sum(size % 8 > 0 for size in found) > 300
    assert all(max(launches.draw(0, i, 50).shape.m, 1) <= 50 for i in range(100))


@pytest.mark.parametrize("arithmetic", launches.SETTINGS)
def test_every_kernel_can_be_forced(arithmetic: str) -> None:
    every = kernels({"bf16": "16_bits", "fp16": "16_bits"}.get(arithmetic, arithmetic))
    plans = [
        replace(DRAWN[0], arithmetic=arithmetic, kernel=(place + 0.5) / len(every), order=(1, 3, 2)).plan()
        for place in range(len(every))
    ]
    assert [plan and plan[:2] for plan in plans] == every
    swap_ab = family_number(SWAP_AB)
    for plan in plans:
        assert plan is not None
        splits = 4 if divides_k(*plan[:2]) else 1
        assert plan[2:] == ((0, 1, 4) if plan[0] == swap_ab else (1, 8, splits))
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


def test_padding_ends_with_the_gap() -> None:
    for gap, behind in ((0, 0), (2, 2), (5, 3)):
        layout = Layout(1, gap)
        memory = layout.memory(torch.empty(4, 5))
        layout.view(memory, (4, 5), 3).fill_(0.0)
        assert int((memory == 0).sum()) == 4 * (5 + behind)
    alone = Layout(1, 0)
    memory = alone.memory(torch.empty(1, 5))
    alone.view(memory, (1, 5), 3).fill_(0.0)
    assert int((memory == 0).sum()) == 5 + 3, "no row follows a single one"


# --- a launch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_launch_of_each_epilogue_on_the_cpu(name: str) -> None:
    layouts = (Layout(1, 3), Layout(0, 1, True), Layout(2, 5), *(Layout(1, i) for i in range(9)))
    count = 3 + len(PROBLEMS[name].operands)
    for arithmetic in launches.SETTINGS:
        launch = Launch(0, 1, name, Shape(9, 13, 21), arithmetic, 0.5, (0, 0, 0), layouts[:count])
        assert launches.run(launch, CPU) == Outcome()


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_the_native_module_is_given(name: str) -> None:
    """The epilogue that is forced computes the problem."""
    problem = PROBLEMS[name]
    case = Launch(0, 0, name, Shape(6, 10, 8), SPLIT, None, (0, 0, 0), ()).case
    data = make_data(case, CPU, 0)
    given = launches.native(problem, data.parameters)
    assert (given is None) == (problem.epilogue == "scale_batch_norm" and name.startswith("linear/"))
    if given is None:
        return
    epilogue, bias, operands, scalars = given
    found = named(epilogue)
    assert found is not None
    assert (epilogue in EPILOGUES) == (name.startswith("linear/") or found.is_bias_relu)
    in_order = found.in_order(bias, operands, scalars)
    assert in_order is not None and data.weight is not None
    torch.testing.assert_close(
        found.reference(data.x @ data.weight.t(), in_order),
        problem.eager(data.x, data.weight, data.parameters),
    )


def test_what_is_forced_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that is not refused takes the tensors of its launch: a dry run tells, of an H200."""
    ended: list[tuple[str, int]] = []

    def dry(out: Tensor, name: str, x: Tensor, weight: Tensor, arithmetic: str, **more: Any) -> None:
        epilogue = named(name)
        assert epilogue is not None
        given = epilogue.in_order(more["bias"], more["operands"], more["scalars"])
        assert given is not None
        call = LinearCall(epilogue, x, weight, given, out=out)
        found = dry_runs.dry_run(
            call,
            dry_runs.ALL_KEPT,
            circumstances=dry_runs.ROUTED | dry_runs.OUT_APART | dry_runs.OUT_PADDED,
            plan=(dry_runs.ARITHMETICS.index(arithmetic), *more["plan"]),
            gpu=KNOWN["H200"].numbers,
        )
        ended.append((found.refused, found.answer))

    monkeypatch.setattr(launches, "forced_into", dry)
    every = [launches.draw(0, number, 40) for number in range(400)]
    for launch in every:
        data = launches._placed(launch.case, launch, CPU)
        out = launch.layouts[2].placed(torch.empty(launch.shape.m, launch.shape.n, dtype=data.x.dtype))
        launches._forced(launch, data, out)
    assert {answer for refused, answer in ended if not refused} == {0}
    assert sum(not refused for refused, _ in ended) > len(every) / 4


@pytest.mark.parametrize(
    ("message", "is_refused"),
    [("plan: x is not a row-major matrix", True), ("plan [0]: DOES_NOT_FIT", False)],
)
def test_what_is_refused_is_told_from_what_fails(
    message: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced_into(*arguments: object, **more: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(launches, "forced_into", forced_into)
    launch = replace(RELU, kernel=0.0)
    data = launches._placed(launch.case, launch, CPU)
    if is_refused:
        assert launches._forced(launch, data, data.x) == ("", message)
    else:
        with pytest.raises(RuntimeError, match="DOES_NOT_FIT"):
            launches._forced(launch, data, data.x)


@pytest.mark.parametrize(
    ("arithmetic", "k", "kernel", "precision"),
    [
        (SPLIT, 127, "a kernel", "high"),
        (SPLIT, 128, "a kernel", "highest"),
        (SPLIT, 127, "", "highest"),
        ("bf16", 8, "a kernel", "highest"),
    ],
)
def test_a_split_of_short_sums_is_held_to_less(arithmetic: str, k: int, kernel: str, precision: str) -> None:
    launch = replace(RELU, arithmetic=arithmetic, shape=Shape(8, 8, k))
    case = launches.held_to(launch, kernel)
    assert case.setting.precision == precision and case.setting.dtype is launch.case.setting.dtype


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
def test_what_is_wrong_is_seen(spoil: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = launches.planned

    def planned(problem: Problem, data: Data, out: torch.Tensor) -> None:
        real(problem, data, out)
        spoil(out)

    monkeypatch.setattr(launches, "planned", planned)
    found = launches.described(RELU, CPU)
    assert why in found.wrong and not found.raised


@pytest.mark.parametrize("arithmetic", launches.SETTINGS)
def test_what_may_be_written_behind_a_row(arithmetic: str) -> None:
    """In 16 bits a copy stores a result whose rows are no whole 16 bytes, and nothing beside it."""
    launch = replace(RELU, arithmetic=arithmetic)
    assert launches.padding(launch, "a kernel") == (3 if arithmetic in (SPLIT, SCALED) else 0)
    assert launches.padding(launch, "") == 0
    by_columns = (*RELU.layouts[:2], Layout(1, 3, True), *RELU.layouts[3:])
    assert launches.padding(replace(launch, layouts=by_columns), "a kernel") == 0


def test_an_exception_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "planned", lambda *_: 1 / 0)
    assert launches.described(RELU, CPU) == Outcome(wrong="ZeroDivisionError: division by zero", raised=True)


# --- the processes ----------------------------------------------------------------------------------------------------


class Scripted:
    """A process that says what the script says."""

    script: list[Outcome | None]
    started = 0

    def __init__(self, device: torch.device) -> None:
        Scripted.started += 1

    def launch(self, launch: Launch, limit_s: float) -> Outcome | None:
        return Scripted.script.pop(0)

    def end(self) -> str:
        return ""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(random_launches, "Worker", Scripted)
    monkeypatch.setattr(Scripted, "started", 0)
    return Scripted


def test_what_hangs_is_reported_and_its_process_replaced(
    scripted: type[Scripted], capsys: pytest.CaptureFixture[str]
) -> None:
    fine, wrong = Outcome("a kernel", ""), Outcome(wrong="3 elements")
    scripted.script = [fine, None, wrong, fine, Outcome(wrong="CUDA", raised=True), Outcome("", "odd K")]
    found = random_launches.run(DRAWN[:6], CPU, 5.0, None)
    assert [(each["number"], each["why"]) for each in found.failed] == [
        (1, "nothing came of it in 5 s"),
        (2, "3 elements"),
        (4, "CUDA"),
    ]
    assert scripted.started == 3 and found.launched == 6
    assert found.kernels == {"a kernel": 2, "planned": 4} and found.refused == {"odd K": 1}
    assert "FAILED: seed 0 number 1: " in capsys.readouterr().out


def test_a_batch_has_a_process(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_launches, "BATCH", 3)
    scripted.script = [Outcome()] * 7
    assert random_launches.run(DRAWN[:7], CPU, 5.0, None).launched == 7 and scripted.started == 3


def test_no_launch_starts_when_the_time_is_up(scripted: type[Scripted]) -> None:
    found = random_launches.run(DRAWN[:4], CPU, 5.0, -1.0)
    assert (found.launched, found.left_out, scripted.started) == (0, 4, 0)


class Stopped(random_launches.Worker):
    """Its process starts, and then stands still."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)


def test_a_real_process_that_says_nothing_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_launches, "Worker", Stopped)
    found = random_launches.run([RELU], CPU, 0.1, None)
    assert [each["why"] for each in found.failed] == ["nothing came of it in 0.1 s"]


class Killed(random_launches.Worker):
    """Its process starts, and is killed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._process.kill()


def test_a_real_process_that_ends_is_told_from_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_launches, "Worker", Killed)
    found = random_launches.run([RELU], CPU, 60.0, None)
    assert [each["why"] for each in found.failed] == ["the process ended with -9"] and not found.stopped


ABSENT = torch.device("cuda", 99)


def test_where_no_process_starts_nothing_is_launched() -> None:
    """The end of its stderr says why."""
    found = random_launches.run(DRAWN[:3], ABSENT, 5.0, None)
    assert (found.launched, found.left_out, found.failed) == (0, 3, [])
    begin = "no process that launches could start: the process ended with 1\n"
    assert found.stopped.startswith(begin) and "set_device" in found.stopped


def test_no_process_that_starts_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> None:
        raise NotStarted("the process ended with 1")

    monkeypatch.setattr(random_launches, "Worker", refuse)
    output = tmp_path / "record.json"
    command = ["--device", "cpu", "--count", "3", "--trees", TREES, "--output", str(output)]
    assert random_launches.main(command) == 1
    record = json.loads(output.read_text())
    assert not record["complete"] and record["left_out"] == 3
    assert record["stopped"] == "no process that launches could start: the process ended with 1"
    assert f"FAILED: {record['stopped']}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_index(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device` takes none without."""
    seen: list[torch.device] = []

    def run(every: object, device: torch.device, *limits: object) -> Found:
        seen.append(device)
        return Found()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(random_launches, "run", run)
    monkeypatch.setattr(random_launches, "record", lambda *about: {"never_forced": []})
    assert random_launches.main(["--device", name]) == 0
    assert seen == [torch.device("cuda", index)]
    with pytest.raises(SystemExit):
        random_launches.main(["--device", "cuda:2"])


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
    assert len(record["never_forced"]) == 106
    assert "3 launches, 0 failed" in capsys.readouterr().out


def test_a_failure_exits_with_one(scripted: type[Scripted], capsys: pytest.CaptureFixture[str]) -> None:
    scripted.script = [Outcome(wrong="3 elements")]
    assert random_launches.main(["--device", "cpu", "--only", "5", "--trees", TREES]) == 1
    assert "FAILED: seed 0 number 5: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--count", "0"], ["--only", "-1"], ["--shard", "3/2"], ["--largest", "0"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        random_launches.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2


def test_nothing_is_counted_twice() -> None:
    found = Found()
    found.add(RELU, Outcome("a kernel"))
    assert (found.launched, found.kernels, found.failed) == (1, {"a kernel": 1}, [])


@pytest.mark.gpu
def test_launches_on_a_gpu(tmp_path: Path) -> None:
    """Some of them forced; nothing is wrong, and no plan is malformed. Other tests may use the GPU meanwhile."""
    output = tmp_path / "record.json"
    command = ["--count", "12", "--largest", "512", "--limit", "240", "--trees", TREES]
    status = random_launches.main([*command, "--output", str(output)])
    record = json.loads(output.read_text())
    assert status == 0, record["failed"] or record["stopped"]
    assert record["launched"] == 12 and record["kernels"]
