"""The alternatives: all compute what ours computes, and which of them take part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import cutlass
from benchmarks.baselines import BASELINES, FALLBACK, select
from benchmarks.cases import Case, Problem, Setting, Shape, custom, glu, make_data
from benchmarks.cases.problems import problems
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.pairs import PairReference
from benchmarks.harness.records import BUILTIN, CUTLASS, EAGER, MAX_AUTOTUNE, MM, OURS
from benchmarks.harness.runner import new_out

CPU, SHAPE = torch.device("cpu"), Shape(6, 32, 24)
BF16, FP32 = Setting("bf16", "highest"), Setting("fp32", "highest")
PROBLEMS, PAIRS = custom.problems(), {problem.epilogue: problem for problem in glu.problems()}


@pytest.mark.parametrize("setting", [FP32, BF16], ids=str)
@pytest.mark.parametrize("problem", [*PROBLEMS.values(), *PAIRS.values()], ids=lambda each: each.name)
def test_ours_writes_the_right_result(problem: Problem, setting: Setting) -> None:
    """Of a pair of products it gets views of the one weight. The built-in is our own function of the same epilogue."""
    case = Case(problem, SHAPE, setting)
    data, out = make_data(case, CPU, 0), new_out(case, CPU)
    reference = (PairReference if problem.name in map("glu/{}".format, PAIRS) else Reference)(case, data, 0)
    for name in (OURS, BUILTIN) if problem.ours else (OURS,):
        assert not BASELINES[name].applies(case, CPU)
        alternative = BASELINES[name].prepare(case, data, out.fill_(float("nan")))
        assert alternative.run() is out and alternative.kernel == FALLBACK
        assert reference.compare(out, alternative.roundings).ok


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activation", PAIRS)
def test_the_bound_of_a_pair(activation: str, dtype: str) -> None:
    """PyTorch's own result is within it; a half in the other's place, a tenth of a percent and a NaN are not."""
    case = Case(PAIRS[activation], SHAPE, Setting(dtype, "highest"))
    data = make_data(case, CPU, 0)
    data.refill(signed=True, seed=1)
    assert data.weight is not None
    reference = PairReference(case, data, 0)
    right = case.problem.eager(data.x, data.weight, data.parameters)
    assert reference.compare(right, 3).ok
    first, second = F.linear(data.x, data.weight).chunk(2, -1)
    turned = glu.ACTIVATIONS[activation](second) * first
    off = right * (1.001 if dtype == "fp32" else 1.05)
    poisoned = right.clone()
    poisoned[0, 0] = float("nan")
    for wrong in (turned, off, poisoned, right[:, :-1]):
        assert not reference.compare(wrong, 3).ok


@pytest.mark.parametrize(
    ("wanted", "excluded", "names"),
    [
        ([], [], [OURS, EAGER, MM]),
        ([], [EAGER], [OURS, MM]),
        ([EAGER], [EAGER], [OURS, EAGER]),
        ([MAX_AUTOTUNE, MM], [], [OURS, MM, MAX_AUTOTUNE]),
    ],
)
def test_who_takes_part(wanted: list[str], excluded: list[str], names: list[str]) -> None:
    """What is slow to prepare only where it is named; ours always."""
    among = [BASELINES[name] for name in (OURS, EAGER, MM, MAX_AUTOTUNE)]
    found, absent = select(among, wanted, excluded)
    assert [baseline.name for baseline in found] == names
    assert set(absent) == {baseline.name for baseline in among} - set(names)
    with pytest.raises(
        ValueError, match="peers: got 'nobody'; accepted are epigemm, eager, mm, max_autotune"
    ):
        select(among, ["nobody"])


# --- CUTLASS's GEMM: its tiles, and why it is absent ------------------------------------------------------------------


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
