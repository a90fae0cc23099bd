"""`python -m epigemm.tune`, on the stage of the tests of tuning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epigemm import packs, tables, tuning_cli
from epigemm.epilogues import BIAS_RELU
from tests.python.stage import Stage, plans_tried
from tests.support.untyped import backends


def options(*arguments: str) -> Any:
    return tuning_cli._parser().parse_args(arguments)


def test_rows_of_a_grid() -> None:
    assert options("--rows", "1,200,33").rows == [1, 200, 33]
    assert options().rows == [1, 16, 64, 256, 1024, 4096]
    assert options().output is None, "the user's cache"
    for wrong in ("", "0", "1,0", "-1", "1:4", "1,", "many"):
        with pytest.raises(SystemExit):
            options("--rows", wrong)


def test_a_grid() -> None:
    chosen = options("--weights", "64x32,32x64", "--dtypes", "bf16,fp32", "--epilogues", "bias,bias_relu")
    setups = list(tuning_cli.setups(chosen))
    assert len(setups) == len(set(setups)) == 2 * 2 * (1 + 2 * 2)
    assert setups[0].n == 64 and setups[-1].n == 32
    for wrong in (["--sizes", "1:4"], ["--weights", "64"], ["--dtypes", "fp8"], ["--epilogues", "sigmoid"]):
        with pytest.raises(SystemExit):
            options(*wrong)


SETUP = tuning_cli.Setup(BIAS_RELU, torch.bfloat16, 64, 32, "ieee", packs.NONE)


def test_a_grid_is_measured_once(stage: Stage) -> None:
    """What is known is not measured again, nor handed back as new."""
    cpu = torch.device("cpu")
    found = tuning_cli._measure(SETUP, 64, cpu, {})
    (entry,) = found.values()
    assert found == {entry.key: entry} and entry.m == 64 and entry.bias and plans_tried(stage) > 8
    known = dict(found)
    assert tuning_cli._measure(SETUP, 64, cpu, known) == {} and plans_tried(stage) == 0 and known == found
    (other,) = tuning_cli._measure(SETUP, 16, cpu, known).values()
    assert other.m == 16 and plans_tried(stage) > 8 and known == found
    stage.us = lambda plan: 20.0
    (again,) = tuning_cli._measure(SETUP, 64, cpu, {}).values()
    assert again.key == entry.key and again.fused_us == 20.0


def test_no_memory_for_a_point_of_the_grid(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left\nat all")

    monkeypatch.setattr(tuning_cli, "measure", fail)
    before = backends.cuda.matmul.fp32_precision
    assert tuning_cli._measure(SETUP._replace(setting="tf32"), 64, torch.device("cpu"), {}) == {}
    assert capsys.readouterr().out == "bias_relu, M = 64, N = 64, K = 32: no memory left\n"
    assert backends.cuda.matmul.fp32_precision == before


class OnCpu:
    """torch with a CPU in place of its CUDA device."""

    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda device: "NVIDIA H200")

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def command(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tables.Entries]:
    """Runs the command on the stage; what its file then holds."""
    monkeypatch.setattr(tuning_cli, "torch", OnCpu())
    monkeypatch.setattr(tuning_cli, "why_none", lambda tensor: "")
    path = tmp_path / "table.json"

    def run(*arguments: str) -> tables.Entries:
        small = ["--weights", "64x32", "--dtypes", "bf16", "--epilogues", "bias_relu", "--output", str(path)]
        assert tuning_cli.main([*small, *arguments]) == 0
        return tables.read(path, "NVIDIA H200")

    return run


def test_the_command_adds_to_a_table(
    stage: Stage, command: Callable[..., tables.Entries], capsys: pytest.CaptureFixture[str]
) -> None:
    first = command("--rows", "16,64")
    assert {entry.m for entry in first.values()} == {16, 64} and plans_tried(stage) > 8
    assert "2 new choices in " in capsys.readouterr().out
    stage.us = lambda plan: 20.0
    second = command("--rows", "64,256")
    assert sorted(entry.m for entry in second.values()) == [16, 64, 256] and first.items() <= second.items()
    shown = capsys.readouterr().out
    assert "1 new choices in " in shown and ", 2 were there\n" in shown
    third = command("--rows", "64,256", "--again")
    fresh = [entry for entry in third.values() if entry.m != 16]
    assert len(third) == 3 and [entry.fused_us for entry in fresh] == [20.0, 20.0]
    assert next(entry for entry in third.values() if entry.m == 16) in first.values()
    plans_tried(stage)
    assert command("--rows", "512", "--time-budget", "-1") == third and plans_tried(stage) == 0
    assert "the time was up before the end" in capsys.readouterr().out


@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
def test_the_command_keeps_what_another_process_adds_meanwhile(
    again: list[str],
    stage: Stage,
    command: Callable[..., tables.Entries],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = tuning_cli._measure
    (entry,) = original(SETUP, 8, torch.device("cpu"), {}).values()

    def measure_beside_another(*given: Any) -> tables.Entries:
        tables.merge(tmp_path / "table.json", "NVIDIA H200", [entry])
        return original(*given)

    monkeypatch.setattr(tuning_cli, "_measure", measure_beside_another)
    found = command("--rows", "16", *again)
    assert found[entry.key] == entry and sorted(each.m for each in found.values()) == [8, 16]


def test_what_was_measured_is_kept_though_the_command_ends_early(
    stage: Stage, command: Callable[..., tables.Entries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tuning_cli._measure

    def interrupted(setup: tuning_cli.Setup, m: int, *given: Any) -> tables.Entries:
        if m == 64:
            raise KeyboardInterrupt
        return original(setup, m, *given)

    monkeypatch.setattr(tuning_cli, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command("--rows", "16,64")
    assert [entry.m for entry in tables.read(tmp_path / "table.json", "NVIDIA H200").values()] == [16]


@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
def test_what_two_setups_share_is_measured_once(
    again: list[str], command: Callable[..., tables.Entries], capsys: pytest.CaptureFixture[str]
) -> None:
    """The TF32 kernels read a weight as it is, with its pack kept or not."""
    backends.mkldnn.matmul.fp32_precision = "bf16"  # what "tf32" is to a GPU, to the stage's CPU
    grid = ["--rows", "64", "--dtypes", "fp32", "--settings", "tf32"]
    for measured in (1, len(again)):
        found = command(*grid, *again)
        lines = [line for line in capsys.readouterr().out.splitlines() if ": tf32: plan" in line]
        assert len(lines) == measured
    kinds = sorted((entry.arithmetic, entry.packed) for entry in found.values())
    assert kinds == [("scaled", False), ("scaled", True), ("tf32", False)]


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
def test_a_table_that_cannot_be_read_ends_the_command(
    again: list[str], stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured: it could not be added to either."""
    output = tmp_path / "a folder"
    output.mkdir()
    small = ["--rows", "16", "--weights", "64x32", "--dtypes", "bf16", "--epilogues", "bias_relu"]
    assert tuning_cli.main([*small, "--output", str(output), *again]) == 1
    assert capsys.readouterr().out.startswith(f"{output} cannot be read: ")
    assert not stage.ran and not list(output.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"format": 0}'])
def test_a_damaged_table_is_begun_anew(
    text: str, command: Callable[..., tables.Entries], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.json").write_text(text)
    assert [entry.m for entry in command("--rows", "16").values()] == [16]
    shown = capsys.readouterr().out
    assert "table.json is begun anew: " in shown and ", 0 were there\n" in shown


def test_the_command_says_why_it_does_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, "-m", "epigemm.tune"], capture_output=True, text=True)
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stdout
    assert "Warning" not in done.stderr


def test_importing_the_commands_module_leaves_the_function() -> None:
    code = "import epigemm; f = epigemm.tune; import epigemm.tune; assert epigemm.tune is f"
    subprocess.run([sys.executable, "-c", code], check=True)
