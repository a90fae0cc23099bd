"""The functors that costs are fitted to, and the table that is made of a record."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.runner import Budget
from epigemm._native import build_info
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.planner import dry_runs
from tools import cost_table
from tools.cost_functors import PLAIN, PRIMITIVES, Functor, bare, random_functors, repeated
from tools.cost_table import COLUMNS
from tools.fit_costs import KERNELS, Kernel, Sweep, _judged, _repeats, main


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_is_repeated(name: str) -> None:
    """Beside steps as short as a product, and with the form for 16 bits that a call of it alone has."""
    functor = repeated(name, 3)
    parts = functor.primitives
    assert parts.count(name) == 3
    assert {*parts} - {name} <= PLAIN.keys()
    for rounded_to in ROUNDED_TO.values():
        once = short_number(repeated(name, 1).epilogue.traced.program, rounded_to)
        assert short_number(functor.epilogue.traced.program, rounded_to) == once


def test_random_functors() -> None:
    functors = random_functors(7, 8)
    assert [each.text for each in functors[:3]] == [each.text for each in random_functors(7, 3)]
    assert len({each.text for each in functors}) == 8
    z = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for each in functors:
        assert each.epilogue.elementwise(z, 1.01).shape == z.shape
        assert {*each.primitives} <= cost_table.read().keys()


def test_the_plans_are_there() -> None:
    """By the numbers of this build's families and tiles."""
    families = list(build_info()["families"])
    assert families == ["sm90_tma", "sm90_swap_ab", "sm90_fp16x3", "sm80_mma"]
    for kernel in KERNELS:
        if kernel.plan:
            arithmetic = dry_runs.ARITHMETICS[kernel.plan[0]]
            tiles: Any = build_info()["families"][families[kernel.plan[1]]]
            assert kernel.plan[2] < tiles["16_bits" if arithmetic == "ieee" else arithmetic]


def test_a_record_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.def"
    path.write_text(cost_table.PATH.read_text())
    before = cost_table.read()
    monkeypatch.setattr(cost_table, "PATH", path)
    record: dict[str, Any] = {"kind": "functors", "gpu": "NVIDIA H200", "csrc": "0123456789abcdef"}
    record |= {
        "primitives": {
            "sin": dict.fromkeys(COLUMNS, 0.5),
            "cos": {"slices": 2.0},
            "tan": {"elementwise_16": 1.0, "cooperative_16": 0.1, "pingpong_16": 9.0, "swap_ab_16": 0.9},
        }
    }
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(record))
    assert main(["--table", str(summary)]) == 0
    after = cost_table.read(path)
    assert after["sin"] == dict.fromkeys(COLUMNS, 0.5) | {"pingpong": 0.8, "pingpong_16": 0.8}
    assert after["cos"] == before["cos"] | {"slices": 2.0}
    of_tan = {"elementwise_16": 1.0, "cooperative_16": 0.8, "pingpong_16": 9.0, "swap_ab_16": 0.9}
    assert after["tan"] == before["tan"] | of_tan
    assert "Measured on NVIDIA H200, csrc 0123456789ab;" in path.read_text()
    summary.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main(["--table", str(summary)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "needs a GPU"), (["--primitives", "sin", "none"], "--primitives: got none; accepted are mul,")],
)
def test_wrong_usage_exits_with_two(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


class Pretended(Sweep):
    """On a device whose functors take what a table says, all but one."""

    def __post_init__(self) -> None:
        self.multiprocessors, self.clock_mhz, self.rows = 132, 1980.0, 128 * 132
        self.budget, self.bare, self.true = Budget(), bare(), cost_table.read()

    def tensors(self, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        return (torch.empty(0),) * 3

    def call(self, kernel: Kernel, functor: Functor, tensors: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        if functor.name.startswith("tan_"):
            raise RuntimeError("no kernel")
        column = kernel.column
        if functor.text and not functor.has_short_forms:  # a random one
            column = column.removesuffix("_16")
        cycles = sum(cost_table.fused(self.true[name], column) for name in functor.primitives)
        product = cost_table.fused(self.true["mul"], column)
        us = 50.0 + self.microseconds(kernel, cycles - product, 50.0)
        return lambda: torch.tensor(us)


class Taken:
    """A timer whose times are the results."""

    def warm_up(self, run: Callable[[], Tensor]) -> float:
        return 1.0

    def in_turn(self, runs: Sequence[Callable[[], Tensor]], *more: Any) -> list[list[float]]:
        return [[1e-3 * float(run())] for run in runs]


@pytest.fixture(scope="module")
def drawn() -> list[Functor]:
    """Each is traced when it is made, which takes most of a test's time."""
    return random_functors(1, 10)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.column)
def test_costs_are_found_again(kernel: Kernel, drawn: list[Functor]) -> None:
    """Of another table than the one that says how often a primitive is repeated."""
    bench: Any = SimpleNamespace(timer=Taken(), effort=None)
    sweep = Pretended(bench)
    before = cost_table.read()
    for of in sweep.true.values():
        of.update({column: 1.7 * cycles + 0.001 for column, cycles in of.items()})
    for name, times in PLAIN.items():
        sweep.true[name] = {column: times * of for column, of in sweep.true["mul"].items()}
    sweep.primitives(kernel, _repeats(["sin", "mul", "tan", "pow", "floor_div"], before, kernel), before)
    for name in ("sin", "pow", "floor_div", "mul", "clamp"):
        wanted = cost_table.fused(sweep.true[name], kernel.column)
        assert sweep.costs[name][kernel.column] == pytest.approx(wanted, rel=0.02), name
    assert list(sweep.failed.values()) == ["RuntimeError: no kernel"]
    sweep.costs.update(sweep.true)
    sweep.random(kernel, drawn, before)
    assert _judged(sweep.checks)["by_column"][kernel.column]["worst_error"] < 0.05
