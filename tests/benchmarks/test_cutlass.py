"""CUTLASS's GEMM beside the mma.sync kernels: its tiles, why it is absent, and how it is compiled."""

from __future__ import annotations

import ctypes
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

BF16, TF32, FP16 = SETTINGS
ROOT = Path(__file__).parents[2]
LOCATE = [sys.executable, str(ROOT / "build_backend" / "locate.py"), "--missing-for-cuda"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cutlass.build.cache_clear()
    yield
    cutlass.build.cache_clear()


def test_the_tiles_are_ours() -> None:
    """All by vectors but that of 16 rows."""
    ours = [tile.text for tile in tiles(BF16, gpu=(90, 132))]
    assert cutlass.tiles() == [text for text in ours if text != "16x64x64"]


def test_where_it_applies() -> None:
    baseline, (first, *_, last) = cutlass.baseline(""), tiles(BF16, gpu=(90, 132))
    cuda, shape = torch.device("cuda"), Shape(64, 64, 64)
    assert baseline.name == CUTLASS and not baseline.applies(case_of(shape, BF16, first, 1), cuda)
    assert baseline.applies(case_of(shape, BF16, last, 1), cuda) == "gemm.cu has no tile 16x64x64"
    for setting in (TF32, FP16):
        assert baseline.applies(case_of(shape, setting, first, 1), cuda) == "compiled for bf16 alone"


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
    """A function for each tile."""
    built = cutlass.build("", (9, 0))
    assert built.path is not None, built.problem
    library = ctypes.CDLL(str(built.path))
    for tile in cutlass.tiles():
        assert getattr(library, cutlass.symbol_of(tile))
