"""The functors that costs are fitted to, and the table that is made of a record."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from epigemm._native import build_info
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.planner import dry_runs
from tools import cost_table, judge_costs
from tools.cost_functors import PLAIN, PRIMITIVES, random_functors, repeated
from tools.cost_table import COLUMNS
from tools.fit_costs import KERNELS, main


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
    assert families == ["sm90_tma", "sm90_swap_ab", "sm90_fp16x3", "sm80_mma", "sm90_few_rows"]
    for kernel in KERNELS:
        if kernel.plan:
            arithmetic = dry_runs.ARITHMETICS[kernel.plan[0]]
            tiles: Any = build_info()["families"][families[kernel.plan[1]]]
            assert kernel.plan[2] < tiles["16_bits" if arithmetic == "ieee" else arithmetic]


def test_a_record_becomes_a_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.def"
    before = cost_table.read()
    record: dict[str, Any] = {"kind": "functors", "gpu": "NVIDIA H200", "csrc": "0123456789abcdef"}
    record |= {
        "primitives": {
            "sin": dict.fromkeys(COLUMNS, 0.5),
            "cos": {"slices": 2.0},
            "tan": {"elementwise_16": 1.0, "cooperative_16": 0.1, "pingpong_16": 9.0, "swap_ab_16": 0.9},
        }
    }
    path.write_text(cost_table.text(*cost_table.updated(before, record)))
    after = cost_table.read(path)
    assert after["sin"] == dict.fromkeys(COLUMNS, 0.5) | {"pingpong": 0.8, "pingpong_16": 0.8}
    assert after["cos"] == before["cos"] | {"slices": 2.0}
    of_tan = {"elementwise_16": 1.0, "cooperative_16": 0.8, "pingpong_16": 9.0, "swap_ab_16": 0.9}
    assert after["tan"] == before["tan"] | of_tan
    assert "Measured on NVIDIA H200, csrc 0123456789ab;" in path.read_text()
    path.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main(["--table", str(path)])


# --- how right the cost models are ------------------------------------------------------------------------------------


def point(*plans: tuple[str, float, float]) -> dict[str, Any]:
    """Of a name, measured and predicted microseconds each."""
    made = [
        {"plan": [0, 0, 0, 1, 1], "name": name, "us": us, "predicted_us": predicted}
        for name, us, predicted in plans
    ]
    return {"arithmetic": "ieee", "plans": made}


POINTS = [
    point(("a", 100.0, 110.0), ("b", 80.0, 120.0)),
    point(("a", 100.0, 90.0), ("b", 200.0, 200.0)),
    point(("a", 10.0, 10.0), ("b", 8.0, 0.0)),
]


def test_errors_and_regrets() -> None:
    found = judge_costs.errors(POINTS)
    assert found["ieee  a  K in 1"] == pytest.approx([math.log(1.1), math.log(0.9), 0.0])
    assert len(found["ieee  b  K in 1"]) == 2, "without a prediction there is no error"
    assert judge_costs.regrets(POINTS, short=False) == {"ieee": pytest.approx([1.25, 1.0])}
    assert judge_costs.regrets(POINTS, short=True) == {"ieee": pytest.approx([1.25])}
