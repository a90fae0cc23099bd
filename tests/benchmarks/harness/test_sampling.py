"""Some rows and columns of a result are checked in place of all: every wrong tile is found."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.cases import Case, Setting, Shape, custom, make_data
from benchmarks.cases.problems import problems
from benchmarks.harness.sampling import SampledReference, stratified

CPU = torch.device("cpu")


def bf16_case(shape: Shape) -> Case:
    problem = next(p for p in problems() if p.name == "linear/bias_relu")
    return Case(problem, shape, Setting("bf16", "highest"))


def test_sampling_finds_a_wrong_tile_anywhere() -> None:
    """Tiles of 64 x 64 of a result that is large enough to be sampled."""
    case = bf16_case(Shape(1024, 192, 32))
    data = make_data(case, CPU, seed=0)
    data.refill(signed=True, seed=1)
    assert data.weight is not None
    right = torch.relu(data.x.float() @ data.weight.float().t() + data.parameters.vectors["bias"].float())
    out = right.to(torch.bfloat16)
    reference = SampledReference(case, data, seed=0)
    assert reference.compare(out, 0).ok
    for row in range(0, 1024, 64):
        for column in range(0, 192, 64):
            wrong = out.clone()
            wrong[row : row + 64, column : column + 64] += 1.0
            found = reference.compare(wrong, 0)
            assert not found.ok and found.wrong_elements > 0
    unwritten = out.clone()
    unwritten[777, 100] = math.nan
    assert not reference.compare(unwritten, 0).ok
    assert not reference.compare(out[:, :-1], 0).ok and not reference.compare(out.float(), 0).ok


def test_sampling_takes_the_rows_of_a_matrix() -> None:
    case = Case(custom.problems()["residual"], Shape(1024, 192, 32), Setting("bf16", "highest"))
    data = make_data(case, CPU, seed=0)
    assert data.weight is not None
    vectors = {name: v.float() for name, v in data.parameters.vectors.items()}
    right = data.x.float() @ data.weight.float().t() + vectors["bias"] + vectors["shortcut"]
    reference = SampledReference(case, data, seed=0)
    assert reference.compare(right.to(torch.bfloat16), 0).ok
    of_other_rows = right + vectors["shortcut"].roll(1, 0) - vectors["shortcut"]
    assert not reference.compare(of_other_rows.to(torch.bfloat16), 0).ok


@pytest.mark.parametrize(("count", "wanted"), [(1, 4), (4, 4), (5, 4), (1000, 7), (65536, 128)])
def test_stratified_samples_every_band(count: int, wanted: int) -> None:
    picked = stratified(count, wanted, torch.Generator().manual_seed(0)).tolist()
    assert picked == sorted(set(picked)) and picked[0] == 0 and picked[-1] == count - 1
    assert len(picked) == min(count, wanted)
    if wanted < count:
        assert [index * wanted // count for index in picked] == pytest.approx(list(range(wanted)), abs=1)
