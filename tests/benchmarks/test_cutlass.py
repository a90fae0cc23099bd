"""CUTLASS's GEMM beside the mma.sync kernels: its tiles, why it is absent, and how it is compiled."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import cutlass
from benchmarks.cases import Shape
from benchmarks.cases.mma import SETTINGS, case_of, tiles
from benchmarks.harness.records import CUTLASS

BF16, TF32, FP16, SPLIT = SETTINGS
ROOT = Path(__file__).parents[2]
LOCATE = [sys.executable, str(ROOT / "build_backend" / "locate.py"), "--missing-for-cuda"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cutlass.build.cache_clear()
    yield
    cutlass.build.cache_clear()


def test_the_tiles_are_ours() -> None:
    """In bf16 and TF32, all by vectors but that of 16 rows."""
    bf16, tf32 = ([tile.text for tile in tiles(setting, gpu=(90, 132))] for setting in (BF16, TF32))
    bf16.remove("16x64x64")
    assert cutlass.names() == [*(f"bf16_{tile}" for tile in bf16), *(f"tf32_{tile}" for tile in tf32)]


def test_stages_and_warps_are_ours() -> None:
    text = (ROOT / "csrc" / "gemm" / "sm80_mma" / "tiles.h").read_text()
    as_stored, _, _ = text.partition("kTilesSplit")
    rows = re.findall(r"^    \{([\d, ]+), Loads::Vectors(, 4)?\}", as_stored, re.MULTILINE)
    ours = []
    for row, is_tf32 in rows:
        m, n, k, stages, warps_m, warps_n = map(int, row.split(", "))
        ours.append(("tf32" if is_tf32 else "bf16", m, n, k, stages, m // warps_m, n // warps_n))
    theirs = re.findall(r"^GEMM\((\w+), ([\d, ]+)\)", cutlass.SOURCE.read_text(), re.MULTILINE)
    found = [(kind, *map(int, numbers.split(", "))) for kind, numbers in theirs]
    assert found == [row for row in ours if row[1] != 16]


def test_where_it_applies() -> None:
    baseline, (first, *_, last) = cutlass.baseline(""), tiles(BF16, gpu=(90, 132))
    cuda, shape = torch.device("cuda"), Shape(64, 64, 64)
    assert baseline.name == CUTLASS and not baseline.applies(case_of(shape, BF16, first, 1), cuda)
    assert baseline.applies(case_of(shape, BF16, last, 1), cuda) == "gemm.cu has no bf16_16x64x64"
    assert baseline.applies(case_of(shape, FP16, first, 1), cuda) == "gemm.cu has no fp16_128x256x64"
    (of_tf32, *_) = tiles(TF32, gpu=(90, 132))
    assert not baseline.applies(case_of(shape, TF32, of_tf32, 1), cuda)
    (of_split, _) = tiles(SPLIT, gpu=(90, 132))
    assert baseline.applies(case_of(shape, SPLIT, of_split, 1), cuda) == "gemm.cu has no fp32_128x128x32"


@pytest.mark.parametrize("is_variable", [False, True])
def test_a_folder_without_cutlass(is_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cutlass.VARIABLE, str(tmp_path) if is_variable else "")
    built = cutlass.build("" if is_variable else str(tmp_path), (9, 0))
    assert built.path is None and "CUTLASS" in built.problem and str(tmp_path) in built.problem


def test_it_is_absent_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cutlass.baseline("").absent() == "needs a GPU"


def _is_missing() -> bool:
    return bool(subprocess.run(LOCATE, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.slow
@pytest.mark.skipif(_is_missing(), reason="there is no nvcc, or no CUTLASS")
def test_it_compiles() -> None:
    """A function for each type and tile."""
    built = cutlass.build("", (9, 0))
    assert built.path is not None, built.problem
    library = ctypes.CDLL(str(built.path))
    for name in cutlass.names():
        assert getattr(library, f"gemm_{name}")
