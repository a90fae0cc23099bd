"""The kernels that read an fp32 weight as it lies, under plain g++ (tests/csrc/emulation/as_it_lies.cpp).

Addresses, scales, counts, and the arithmetic of a result against the bounds of docs/numerics.md. No kernel runs here.
"""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.gradings import bounds
from tests.csrc.test_mma_kernel import FOLDER
from tests.support.functors import compiled, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("as_it_lies")
    program = compiled((FOLDER / "as_it_lies.cpp").read_text(), folder, "-O1")
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def test_addresses_scales_and_counts(lines: list[str]) -> None:
    """Numbers that a thread reads, bank conflicts, both transposed, places of slices, verdicts, roots, counts."""
    assert lines[0].split() == ["0"] * 8


def test_what_the_range_check_lets_pass(lines: list[str]) -> None:
    assert float(lines[1]) <= 5 / 8


def test_results_are_within_their_bounds(lines: list[str]) -> None:
    bound = {"split": bounds.split, "scaled": bounds.scaled}
    failed = []
    for line in lines[2:]:
        arithmetic, kind, k, shift, ctas, error = line.split()
        if not float(error) * bounds.EPS <= bound[arithmetic](int(k)):
            failed.append((arithmetic, kind, k, shift, ctas, error))
    assert len(lines) == 2 + 4 * (7 * 5 + 2 + 2) * 3
    assert not failed
