"""`python -m benchmarks --host`: its variants, their figures, and the ratios."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.cases import Shape
from benchmarks.cases import host as host_cases
from benchmarks.kinds import host

CPU, SHAPE = torch.device("cpu"), Shape(4, 8, 16)
COMPILED = "compiled/bf16"


@pytest.mark.parametrize("name", [name for name in host_cases.CASES if name != COMPILED])
def test_variants_compute_the_same(name: str) -> None:
    """All but torch's single operators, which leave the rest of the formula out."""
    case = host_cases.make(name, SHAPE, CPU)
    with torch.set_grad_enabled(case.gradients):
        results = {name: run() for name, run in case.runs.items() if name not in ("f_linear", "torch")}
    expected = results.get("eager", results.get("function"))
    for variant, result in results.items():
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2, msg=f"{name}: {variant}")
        assert result.requires_grad == case.gradients


# --- the figures, and the ratios, against numbers worked out by hand --------------------------------------------


@pytest.mark.parametrize(("waits", "mark"), [(0.0, ""), (0.29, ""), (0.31, "limited by the GPU")])
def test_the_least_of_the_rounds_medians_counts(waits: float, mark: str) -> None:
    """And what waits for the device is marked."""
    first, second = [(5.0, 0.1), (1.0, 0.3), (7.0, 0.2)], [(4.0, 0.0), (9.0, 0.9), (6.0, 0.8)]
    record = host.recorded([{"a": first, "b": [(2.0, waits)]}, {"a": second, "b": [(3.0, 0.0)]}])
    assert record == {"a": 5.0, "b": 2.0} | ({"limited_by_gpu": True} if mark else {})
    table = host.times_table({"cases": {"any": record}, "shapes": {"any": ""}})
    assert table.rows[0][-1] == mark


@pytest.mark.parametrize(
    ("case", "times", "rows"),
    [
        (
            "linear_relu/bf16",
            {"f_linear": 10, "eager": 5, "function": 11, "out": 10, "module": 21, "module_eager": 20},
            [
                ["function / f_linear", "1.100", "1.1", ""],
                ["out / function", "0.909", "1", ""],
                ["module / module_eager", "1.050", "1", "missed"],
            ],
        ),
        (
            "linear_relu/fp32",
            {"f_linear": 1, "eager": 10, "function": 10.1},
            [["function / eager", "1.010", "1", "missed"]],
        ),
        (
            "custom_gelu/fp32",
            {"f_linear": 1, "eager": 10, "function": 9, "out": 9},
            [["function / eager", "0.900", "1", ""], ["out / function", "1.000", "1", ""]],
        ),
        (
            "batch_norm/bf16",
            {"torch": 10, "eager": 1, "function": 13.1, "out": 14},
            [["function / torch", "1.310", "1.3", "missed"], ["out / function", "1.069", "1", "missed"]],
        ),
        ("train_step/fp32", {"eager": 10, "module": 12}, [["module / eager", "1.200", "1.2", ""]]),
        (COMPILED, {"inductor": 10, "epigemm": 9}, [["epigemm / inductor", "0.900", "1", ""]]),
    ],
)
def test_the_ratios_and_what_is_wanted(case: str, times: dict[str, float], rows: list[list[str]]) -> None:
    assert host.ratio_table({"cases": {case: times}}).rows == [[case, *row] for row in rows]
