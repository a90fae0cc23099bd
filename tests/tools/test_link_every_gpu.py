"""The mma.sync kernels' machine code for GPUs that are not here: its checks, and the code itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from epigemm.linker import cubins, libraries
from tests.support import plans
from tools import link_every_gpu
from tools.link_every_gpu import SHARED_KB, Found, Tile, problems, problems_of_fixup

ROOT = Path(__file__).parents[2]
TILE = Tile("128x128x32", "multistage", 49152)
RIGHT = {"HMMA": 64, "LDGSTS": 24, "LDL": 0, "STL": 0}


@pytest.mark.parametrize(
    ("operand", "size"), [("float16", 2), ("bfloat16", 2), ("tf32", 4), ("split", 4), ("scaled", 2)]
)
def test_the_tiles_are_the_familys(operand: str, size: int) -> None:
    found = link_every_gpu.tiles(operand)
    is_fp32 = operand in ("tf32", "split", "scaled")
    assert [*found] == list(range(plans.FAMILIES[plans.MMA][operand if is_fp32 else "16_bits"]))
    schedules = {"multistage"} if is_fp32 else {"multistage", "by elements"}
    assert {each.schedule for each in found.values()} == schedules
    most = 99 if is_fp32 else max(SHARED_KB.values())
    for each in found.values():
        m, n, k = map(int, each.text.split("x"))
        assert 0 < 2 * size * k * (m + n) <= each.shared_bytes <= 1024 * most


@pytest.mark.parametrize(
    ("tile", "found", "words"),
    [
        (TILE, Found(232, RIGHT | {"STL": 3}), "spills (0 LDL, 3 STL)"),
        (TILE, Found(232, RIGHT | {"HMMA": 0}), "no HMMA"),
        (TILE, Found(232, RIGHT | {"LDGSTS": 0}), "0 LDGSTS"),
        (TILE._replace(schedule="by elements"), Found(232, RIGHT), "24 LDGSTS"),
        (TILE._replace(shared_bytes=250_000), Found(232, RIGHT), "250000 bytes of shared memory"),
        (TILE, Found(256, RIGHT), "256 registers"),
        (TILE, Found(0, RIGHT), "0 registers"),
    ],
)
def test_wrong_code_has_one(tile: Tile, found: Found, words: str) -> None:
    (problem,) = problems(tile, found)
    assert words in problem


def test_the_fixup_multiplies_in_fp32() -> None:
    right = RIGHT | {"HMMA": 0, "STL": 4, "LDL": 6}
    assert not [*problems_of_fixup(Found(128, right))]
    for wrong, words in (({"HMMA": 1}, "1 HMMA"), ({"LDGSTS": 0}, "0 LDGSTS"), ({"STL": 9}, "15 spills")):
        (problem,) = problems_of_fixup(Found(128, right | wrong))
        assert words in problem


def test_the_command() -> None:
    """One GPU of each amount of shared memory; `make check-wheel` takes them all."""
    if reason := libraries.unavailable():
        pytest.skip(reason)
    if cubins.ir_path("epigemm_open_sm80_mma_bfloat16_0") is None:
        pytest.skip("a build without CUDA")
    command = [sys.executable, "-m", "tools.link_every_gpu", "--gpu", "sm_80", "sm_120", "--epilogue", "bias"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "nvdisasm is missing" in done.stderr:
        pytest.skip("there is no nvdisasm")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    of_tiles = [line for line in lines if link_every_gpu.FIXUP not in line]
    assert len(of_tiles) == 2 * sum(len(link_every_gpu.tiles(each)) for each in link_every_gpu.OPERANDS)
    assert all(line.split()[-1] == "0" for line in of_tiles)  # spills
    assert len(lines) == len(of_tiles) + 2
