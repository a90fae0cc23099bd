"""CUTLASS's GEMM: its tiles, why it is absent, how it is compiled, and that its fastest tile is measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import cutlass
from benchmarks.cases import Case, Setting, Shape
from benchmarks.cases.problems import problems
from benchmarks.harness.records import CUTLASS

BF16, TF32 = Setting("bf16", "highest"), Setting("fp32", "high")
ROOT = Path(__file__).parents[2]


def test_tiles_stages_and_warps_are_those_of_our_mma_kernels() -> None:
    """All by vectors but that of 16 rows."""
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
    assert cutlass.names() == [f"{kind}_{m}x{n}x{k}" for kind, m, n, k, *_ in found]


@pytest.mark.parametrize(
    ("shape", "setting", "why"),
    [
        (Shape(64, 64, 64), BF16, ""),
        (Shape(63, 64, 64), TF32, ""),
        (Shape(64, 64, 60), TF32, ""),
        (Shape(64, 64, 60), BF16, "gemm.cu takes products whose rows are whole 16 bytes"),
        (Shape(64, 63, 64), TF32, "gemm.cu takes products whose rows are whole 16 bytes"),
        (Shape(64, 64), BF16, "gemm.cu takes products whose rows are whole 16 bytes"),
        (Shape(64, 64, 64), Setting("fp16", "highest"), "gemm.cu has no fp16"),
        (Shape(64, 64, 64), Setting("fp32", "highest"), "gemm.cu has no fp32 highest"),
    ],
)
def test_where_it_applies(shape: Shape, setting: Setting, why: str) -> None:
    assert cutlass.BASELINE.name == CUTLASS
    assert cutlass.BASELINE.applies(Case(problems()[0], shape, setting), torch.device("cuda")) == why


def test_a_folder_without_cutlass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cutlass.VARIABLE, str(tmp_path))
    path, problem = cutlass.build((9, 0))
    assert path is None and "CUTLASS" in problem and str(tmp_path) in problem
