"""`python -m epigemm`: what it prints, and that its self-test would see a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import epigemm
from epigemm import __main__ as main
from epigemm._native import registry


def test_the_report() -> None:
    text = main.report()
    for value in epigemm.build_info().values():
        assert str(value) in text
    assert f"epilogues: {', '.join(each['name'] for each in registry())}\n" in text
    x, weight = (f"[{dtype}, 1024 x 4096 x 4096]" for dtype in ("bfloat16", "float32"))
    assert text.index("what would run here:") < text.index(x) < text.index(weight)


def test_right_results() -> None:
    assert main.wrong_results("cpu") == []


@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_wrong_results(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = epigemm.linear_relu

    def wrong(*given: Any) -> Tensor:
        result = right(*given)
        result[3, 5] += 0.5 + error
        return result

    monkeypatch.setattr(epigemm, "linear_relu", wrong)
    assert main.wrong_results("cpu") == [
        "linear_relu in float32 on cpu: wrong",
        "linear_relu in bfloat16 on cpu: wrong",
    ]
