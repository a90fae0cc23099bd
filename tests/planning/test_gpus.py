"""GPUs in figures: those that are known, and what a description must have."""

from __future__ import annotations

from typing import Any

import pytest

import epigemm
from epigemm.planning import gpus, plans
from epigemm.planning.gpus import GPU, KNOWN

FIGURES: dict[str, Any] = {
    "name": "NVIDIA A10",
    "capability": (8, 6),
    "multiprocessors": 72,
    "clock_mhz": 1695,
    "memory_gb_per_s": 600,
    "l2_mb": 6,
}


def test_a_description_is_public() -> None:
    assert epigemm.GPU is GPU
    assert GPU(**FIGURES) == KNOWN["A10"]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"name": 80}, TypeError, "name: got int; accepted is a string"),
        ({"capability": 86}, TypeError, r"capability: got 86; accepted are two integers, as \(8, 6\)"),
        ({"capability": (8, 6, 0)}, TypeError, "capability: got"),
        ({"capability": (8.0, 6)}, TypeError, "capability: got"),
        ({"capability": (7, 5)}, ValueError, r"capability: got \(7, 5\); accepted are \(8, 0\) and later"),
        ({"capability": (9, True)}, TypeError, "capability: got"),
        ({"capability": (8, 12)}, ValueError, r"capability: got \(8, 12\); accepted .*at most 9"),
        ({"capability": (9, -3)}, ValueError, r"capability: got \(9, -3\)"),
        ({"multiprocessors": 1.5}, TypeError, "multiprocessors: got 1.5; accepted is a whole number"),
        ({"multiprocessors": True}, TypeError, "multiprocessors: got True"),
        ({"multiprocessors": 0}, ValueError, "multiprocessors: got 0; accepted is a number from 1 to 65536"),
        ({"multiprocessors": 65537}, ValueError, "multiprocessors: got 65537"),
        ({"clock_mhz": 0.2}, ValueError, "clock_mhz: got 0.2; accepted is a number from 1 to 1000000"),
        ({"clock_mhz": 1e300}, ValueError, "clock_mhz: got 1e.300"),
        ({"clock_mhz": "fast"}, TypeError, "clock_mhz: got 'fast'; accepted is a number"),
        ({"clock_mhz": float("inf")}, ValueError, "clock_mhz: got inf"),
        ({"memory_gb_per_s": float("nan")}, ValueError, "memory_gb_per_s: got nan"),
        ({"l2_mb": -6}, ValueError, "l2_mb: got -6"),
    ],
)
def test_figures_that_are_none(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GPU(**{**FIGURES, **changed})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((name, name) for name in KNOWN),
        *((gpu.name, name) for name, gpu in KNOWN.items()),
        *(("A100", "A100 40 GB"), ("a100 80gb", "A100 80 GB"), ("rtx4090", "RTX 4090")),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_found_by_its_name(given: str, name: str) -> None:
    assert gpus.find(given) is KNOWN[name]


def test_names_are_not_guessed() -> None:
    for given in ("A1", "RTX", "", "A100 20 GB", "sm_80"):
        with pytest.raises(ValueError, match="gpu: got"):
            gpus.find(given)
    own = GPU(**FIGURES)
    assert gpus.find(own) is own


def test_the_planner_takes_every_known_gpu() -> None:
    for gpu in KNOWN.values():
        answer = plans.ask("bias_gelu", 1024, 1024, 1024, "bfloat16", "ieee", gpu=gpu.numbers)
        family = "sm80_mma" if gpu.capability != (9, 0) else "sm90"
        assert answer["candidates"] and not answer["is_speed_assumed"]
        assert all(each["family"].startswith(family) for each in answer["candidates"])


def test_geforce_is_told_by_the_name() -> None:
    assert {name for name, gpu in KNOWN.items() if gpu.is_geforce} == {
        name
        for name in KNOWN
        if name in ("RTX 3080", "RTX 3090", "RTX 4080", "RTX 4090", "RTX 5080", "RTX 5090")
    }
