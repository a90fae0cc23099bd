"""All records of one tree: which jobs run, in what time, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import record_all
from tools.record_all import Job, record

TREES = f"csrc={'a' * 40},python={'b' * 40}"
OTHER = f"csrc={'c' * 40},python={'b' * 40}"


class Commands:
    """In place of processes: what was asked for; a command `("3",)` ends with status 3."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str], log: Path, limit_s: float) -> int:
        self.seen.append(tuple(command))
        return int(command[0]) if command[0].isdigit() else 0


def test_arguments_are_those_of_the_commands(tmp_path: Path) -> None:
    """Each module takes what is given to it: argparse would end with 2 before anything runs."""
    from benchmarks import cli
    from tools import random_launches

    kinds = set()
    for job in record_all.jobs(tmp_path, TREES):
        (command, *_) = job.commands
        if "benchmarks" in command:
            words = command[command.index("benchmarks") + 1 :]
            given = cli.parser().parse_args(["9" if word == record_all.LEFT else word for word in words])
            kinds.add(cli.kind_of(given))
        if "tools.random_launches" in command:
            words = command[command.index("tools.random_launches") + 1 :]
            random_launches.parser().parse_args(["9" if w == record_all.LEFT else w for w in words])
    assert kinds == {"bench", "random", "host", "models", "plans"}, "every kind of record is made"


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    jobs = [Job("good", 1, (("0",),)), Job("bad", 1, (("3",),)), Job("slow", 1, (("124",),))]
    run = Commands()
    ended = record(jobs, tmp_path, TREES, 60, run)
    assert {name: each.status for name, each in ended.items()} == {
        "good": "done",
        "bad": "failed",
        "slow": "timeout",
    }
    assert json.loads((tmp_path / "record_all.json").read_text())["bad"]["trees"] == TREES
    again = Commands()
    record(jobs, tmp_path, TREES, 60, again)
    assert again.seen == [("3",), ("124",)]
    other = Commands()
    record(jobs, tmp_path, OTHER, 60, other)
    assert len(other.seen) == 3


def test_the_budget_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("long", 1000, (("0",),)), Job("short", 10, (("python", record_all.LEFT),))]
    run = Commands()
    ended = record(jobs, tmp_path, TREES, 100, run)
    assert list(ended) == ["short"] and "long: left" in capsys.readouterr().out
    (_, left) = run.seen[0]
    assert 60 <= int(left) <= 100 - record_all.ENDING_S


def test_a_job_that_was_stopped_goes_on_with_the_shards_that_are_left(tmp_path: Path) -> None:
    def job(second: str) -> Job:
        return Job("tool", 40, (("0", "first"), (second, "second"), ("0", "third")), "tool.txt")

    stopped, again = Commands(), Commands()
    ended = record([job("124")], tmp_path, TREES, 60, stopped)
    assert (ended["tool"].status, ended["tool"].done) == ("timeout", [0, 2])
    ended = record([job("0")], tmp_path, TREES, 20, again)  # a third of 40 s is left to do
    assert ended["tool"].status == "done"
    assert again.seen[0] == ("0", "second") and "tools.merge_records" in again.seen[1]
    assert str(tmp_path / "tool-1.log") in again.seen[1]
