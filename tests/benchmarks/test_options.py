"""Every benchmark command in the documentation is accepted by the benchmarks, and what is no command is explained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.cli import kind_of, main, parser
from tests.benchmarks.models.test_kernelbench import make_checkout

TOP = Path(__file__).parents[2]
PAGES = [
    TOP / "README.md",
    *sorted((TOP / "docs").glob("*.md")),
    *sorted((TOP / "benchmarks/results").rglob("notes.md")),
]


def commands() -> list[str]:
    """Without what stands in for a number or is left out."""
    found: list[str] = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        found += re.findall(r"python -m benchmarks( [^`#\n]*|)(?=[`#\n])", text)
    left_out = ("...", "--help")
    taken = [command for command in found if not any(part in command for part in left_out)]
    return [command.replace("SEED", "1").replace(" N", " 2") for command in taken]


def test_there_are_commands() -> None:
    assert len(commands()) > 5


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_documented_command_is_taken(command: str) -> None:
    options = parser().parse_args(shlex.split(command))
    kind = kind_of(options)
    assert kind == "bench" or getattr(options, kind) not in (None, False)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--cases no_such_case", "--cases: 'no_such_case' matches nothing"),
        ("--sizes 8xx", "'8xx'"),
        ("--trees csrc=1", "--trees"),
        ("--peers no_such_peer", "peers: got 'no_such_peer'"),
        ("--between", "goes without --between"),
        ("--short", "--short: goes with --random"),
        ("--count 3", "goes without --count"),
        ("--cases glu/silu --sizes 8x33x16", "8x33x16"),
        ("--device cuda:99", "--device: got 'cuda:99'"),
        ("--random 1 --count 0", "--count: expected at least 1"),
        ("--random 1 --count -1 --between", "--count: expected at least 1"),
        ("--random 1 --quick", "--random: goes without --quick"),
        ("--random 1 --sizes 1x8x8", "--random: goes without --sizes"),
        ("--random 1 --models", "--models: goes without --random"),
        ("--random 1 --cases no_such_case", "'no_such_case' matches nothing"),
        ("--random 1 --cases between/*", "--random: no case is left"),
        ("--random 1 --short --between", "--short: goes without --between"),
        ("--random 1 --short --cases no_such", "'no_such' matches nothing"),
        ("--host --quick --sizes 8x8", "--host: takes one size, MxNxK"),
        ("--host --quick --sizes 4x8x16 8x8x8", "--host: takes one size, MxNxK"),
        ("--host --cases no_such_case", "'no_such_case' matches nothing"),
        ("--host --variants eager_options", "--host: goes without --variants"),
        ("--plans --random 1", "--plans: needs a GPU"),
        ("--plans --peers mm", "--plans: goes without --peers"),
        ("--plans --random 1 --short", "--short: goes with --random"),
        ("--contest swimming", "invalid choice: 'swimming'"),
        ("--contest fp8", "--contest: needs a GPU"),
        ("--models --cases lstm", "'lstm' matches nothing; with --models: bert-base/fp32_highest/inf"),
        ("--models --shard 3/2", "--shard: expected I/N"),
        ("--models --sizes 8x8x8", "--models: goes without --sizes"),
        ("--models --dtypes bf16", "--models: goes without --dtypes"),
        ("--kernelbench CHECKOUT --cases level3/*", "matches nothing; with --kernelbench: level1/1_no"),
        (
            "--kernelbench / --cases level2/*",
            "--kernelbench: expected a checkout with KernelBench/level1 to level3",
        ),
        ("--kernelbench CHECKOUT --variants backend", "--kernelbench: goes without --variants"),
    ],
)
def test_wrong_usage_exits_with_two(
    command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkout(tmp_path)
    given = command.replace("CHECKOUT", str(tmp_path)).split()
    try:
        status = main([*given, *([] if "--device" in given else ["--device", "cpu"])])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2 and said in capsys.readouterr().err
