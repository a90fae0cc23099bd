"""How right the cost models are, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tools import judge_costs


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
