"""The alternatives: all compute what ours computes, and which of them take part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.baselines import BASELINES, FALLBACK, select
from benchmarks.cases import (
    Case,
    Problem,
    Setting,
    Shape,
    custom,
    glu,
    make_data,
)
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.pairs import PairReference
from benchmarks.harness.records import BUILTIN, EAGER, MAX_AUTOTUNE, MM, OURS
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
