"""Reductions by PyTorch's operators: types, accuracy, and the fixed order of the batch-invariant mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.calls import moments, reductions
from epigemm.calls.moments import Moments
from epigemm.epilogues.parts import Parts
from epigemm.epilogues.tracing.results import AMAX, AMIN, MEAN, REDUCTIONS, SUM, VAR
from tests.support.invariance import bits
from tests.support.threads import threads

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wanted(matrix: Tensor, kind: str, axis: int) -> Tensor:
    wide = matrix.double()
    if kind == VAR:
        return wide.var(axis, correction=1)
    found: Tensor = getattr(wide, kind)(axis)
    return found


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(5, 7), (64, 1), (3, 129)], ids=str)
def test_values(
    size: tuple[int, int],
    dtype: torch.dtype,
    kind: str,
    axis: int,
    invariant: bool,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    matrix = torch.randn(size, generator=rng).to(device, dtype)
    found, mean = reductions.reduce(matrix, kind, axis, correction=1.0, invariant=invariant)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        found.double(), wanted(matrix, kind, axis), rtol=1e-5, atol=1e-5, equal_nan=True
    )
    assert (mean is not None) == (kind == VAR)
    if mean is not None:
        torch.testing.assert_close(mean.double(), matrix.double().mean(axis), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_gradients(kind: str, rng: torch.Generator) -> None:
    matrix = torch.randn(4, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    for axis, invariant in ((0, False), (1, False), (1, True)):

        def call(matrix: Tensor, axis: int = axis, invariant: bool = invariant) -> tuple[Tensor, ...]:
            every = reductions.reduce(matrix, kind, axis, correction=0.0, invariant=invariant)
            return tuple(each for each in every if each is not None)

        assert torch.autograd.gradcheck(call, matrix)
        assert torch.autograd.gradgradcheck(call, matrix)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """They share out a long sum where there is one row alone, else the rows."""
    with threads(2):
        yield


@pytest.mark.parametrize("size", [(600, 1000), (8, 300000)], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_the_sum_of_a_row_depends_on_no_other(
    size: tuple[int, int], device: torch.device, rng: torch.Generator
) -> None:
    matrix = torch.randn(size, generator=rng).to(device)
    for kind in REDUCTIONS:
        together, _ = reductions.reduce(matrix, kind, 1, correction=0.0, invariant=True)
        for rows in (slice(0, 1), slice(3, 4), slice(4, 7), slice(100, 350)):
            alone, _ = reductions.reduce(matrix[rows].clone(), kind, 1, correction=0.0, invariant=True)
            assert torch.equal(bits(alone), bits(together[rows])), kind


def test_zeros_in_a_fixed_order() -> None:
    """The larger of 0 and -0 is either to torch: in the mode 0."""
    for row in ([0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]):
        for kind in (AMAX, AMIN):
            found, _ = reductions.reduce(torch.tensor([row]), kind, 1, correction=0.0, invariant=True)
            assert torch.equal(bits(found), torch.zeros(1, dtype=torch.int32))


def test_of_nothing() -> None:
    for shape, axis in (((3, 0), 1), ((0, 3), 0)):
        for invariant in (False, True):
            matrix = torch.empty(shape)
            assert torch.equal(
                reductions.reduce(matrix, SUM, axis, correction=0.0, invariant=invariant)[0], torch.zeros(3)
            )
            mean, _ = reductions.reduce(matrix, MEAN, axis, correction=0.0, invariant=invariant)
            assert bool(mean.isnan().all()) and mean.shape == (3,)


def test_a_variance_without_a_degree_of_freedom() -> None:
    one = torch.ones(2, 1)
    found, _ = reductions.reduce(one, VAR, 1, correction=1.0, invariant=True)
    assert torch.equal(found.isnan(), one.var(1).isnan())


def test_what_runs() -> None:
    launches = reductions.launches
    assert launches(SUM, torch.bfloat16, invariant=False) == ["sum"]
    assert launches(AMAX, torch.bfloat16, invariant=False) == ["amax", "cast to float32"]
    assert launches(VAR, torch.float16, invariant=False) == ["cast to float32", "var_mean"]
    assert launches(VAR, torch.float64, invariant=False) == ["var_mean"]
    (text,) = launches(MEAN, torch.float32, invariant=True)
    assert text.startswith("mean, as sums of two numbers")
    assert launches(AMIN, torch.float32, invariant=True) == ["amin"]


# --- of a call's matrices --------------------------------------------------------------------------------------------


@epigemm.epilogue
def of_two(z: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(z)
    of_z = *torch.var_mean(z, 0, correction=0), z.var(0, correction=2.5), z.sum(0), z.var(1)
    return y, *of_z, y.var(0), (z * z).var(0)


def given_of_two(rng: torch.Generator, rows: int = 40) -> tuple[Parts, dict[int, Tensor]]:
    z = torch.randn(rows, 24, generator=rng).bfloat16()
    found = of_two.parts(torch.bfloat16)
    assert [each.is_wide for each in found.matrices] == [False, False, True, True]
    return found, {0: z, 1: torch.tanh(z), 2: z.float(), 3: z.float().square()}


class Counted:
    """In place of the kernels for a matrix that is there; the matrices that were asked about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Tensor] = []
        monkeypatch.setattr(moments, "column_moments", self)
        monkeypatch.setattr(moments, "is_served", lambda x: x.element_size() == 2)

    def __call__(self, matrix: Tensor) -> Moments:
        self.asked.append(matrix)
        return moments_of(matrix)


def moments_of(matrix: Tensor, axis: int = 0) -> Moments:
    variance, mean = torch.var_mean(matrix.double(), axis, correction=0)
    return Moments(mean.float(), variance.float())


def test_they_follow_from_moments(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """Each matrix is read once for its variances; the shared one, whose moments are known, not at all."""
    found, matrices = given_of_two(rng)
    counted, ran = Counted(monkeypatch), list[tuple[str, int]]()
    reduce = reductions.reduce

    def noting(matrix: Tensor, kind: str, axis: int, **options: Any) -> Any:
        ran.append((kind, axis))
        return reduce(matrix, kind, axis, **options)

    monkeypatch.setattr(reductions, "reduce", noting)
    of_columns, of_rows = (moments_of(matrices[0], axis) for axis in (0, 1))
    for known in ({}, {(0, 0): of_columns}, {(0, 0): of_columns, (0, 1): of_rows}):
        got = reductions.reduce_each(found, matrices, known, invariant=False)
        for each, (value, mean) in zip(found.reductions, got, strict=True):
            want = matrices[each.matrix].double()
            if each.kind == SUM:
                torch.testing.assert_close(value.double(), want.sum(0), rtol=1e-6, atol=1e-5)
                assert mean is None
                continue
            assert value.dtype is torch.float32 and mean is not None
            exact, of_mean = torch.var_mean(want, each.axis, correction=each.correction)
            torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(mean.double(), of_mean, rtol=1e-6, atol=1e-6)
    assert [id(each) for each in counted.asked] == [id(matrices[number]) for number in (0, 1, 1, 1)]
    assert ran == [(VAR, 1), (VAR, 0), (VAR, 1), (VAR, 0), (VAR, 0)]


@epigemm.epilogue
def sums(acc: Tensor) -> tuple[Tensor, ...]:
    return acc, acc.sum(0), acc.mean(0), acc.sum(1), acc.mean(1)


def test_a_sum_or_a_mean_alone_is_pytorchs(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """Unless the product's kernel has given the moments: then it has no other kernel."""
    counted, parts = Counted(monkeypatch), sums.parts(torch.bfloat16)
    z = torch.randn(40, 24, generator=rng).bfloat16()
    wide = z.double()
    want = [wide.sum(0), wide.mean(0), wide.sum(1), wide.mean(1)]
    known = {(0, axis): moments_of(z, axis) for axis in (0, 1)}
    ran: list[str] = []
    reduce = reductions.reduce

    def noting(matrix: Tensor, kind: str, axis: int, **options: Any) -> Any:
        ran.append(kind)
        return reduce(matrix, kind, axis, **options)

    monkeypatch.setattr(reductions, "reduce", noting)
    for given, left in (({}, [SUM, MEAN, SUM, MEAN]), (known, [])):
        ran.clear()
        got = reductions.reduce_each(parts, {0: z}, given, invariant=False)
        torch.testing.assert_close([each.double() for each, _ in got], want, rtol=1e-6, atol=1e-5)
        assert ran == left and all(mean is None for _, mean in got)
    ran.clear()
    reductions.reduce_each(parts, {0: z}, known, invariant=True)
    assert ran == [SUM, MEAN, SUM, MEAN] and not counted.asked


def test_sums_of_special_means() -> None:
    inf, nan = float("inf"), float("nan")
    known = Moments(torch.tensor([inf, -inf, nan, 0.0, 1e-42, 3e38]), torch.zeros(6))
    found, _ = reductions.of_moments(known, SUM, 1000, 0.0)
    assert found[:2].tolist() == [inf, -inf] and found[2].isnan()
    assert found[3] == 0.0 and found[4] == known.mean[4] * 1000 and found[5] == inf
    total = torch.arange(6.0)
    found, _ = reductions.of_moments(known._replace(sum=total), SUM, 1000, 0.0)
    assert found.data_ptr() == total.data_ptr(), "a kernel's own sum is no product"


def test_where_pytorch_reduces(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """Recorded and transformed matrices, the batch-invariant mode, other types, and too few rows for a correction."""
    counted = Counted(monkeypatch)
    found, matrices = given_of_two(rng)
    reductions.reduce_each(found, matrices, {}, invariant=True)
    recorded = {number: each.clone().requires_grad_() for number, each in matrices.items()}
    got = reductions.reduce_each(found, recorded, {}, invariant=False)
    assert all(value.requires_grad for value, _ in got)
    reductions.reduce_each(
        found, {number: each.float() for number, each in matrices.items()}, {}, invariant=False
    )
    many = torch.stack((matrices[0], matrices[0]))
    torch.vmap(lambda z: reductions.reduce_each(found, {**matrices, 0: z, 1: z}, {}, invariant=False)[0][0])(
        many
    )
    assert not counted.asked
    few = {number: each[:1] for number, each in matrices.items()}
    with pytest.warns(UserWarning, match="degrees of freedom"):
        got = reductions.reduce_each(found, few, {}, invariant=False)
    assert len(counted.asked) == 1 and not got[0][0].any() and bool(got[1][0].isnan().all())


@pytest.mark.parametrize("correction", [0.0, 1.0, -1.0, 2.5])
def test_a_variance_of_moments(correction: float, rng: torch.Generator) -> None:
    """As accurate as the moments are: a mean of 1e4, a deviation of 1."""
    matrix = 1e4 + torch.randn(300, 7, generator=rng, dtype=torch.float64)
    variance, mean = reductions.of_moments(moments_of(matrix), VAR, 300, correction)
    assert mean is not None
    want = torch.var_mean(matrix, 0, correction=correction)
    torch.testing.assert_close(variance.double(), want[0], rtol=4 * 2**-24, atol=0)
    assert torch.equal(mean, want[1].float())


def test_results_of_one_tensor_are_apart() -> None:
    """Writing into one changes no version of the other, which a graph may have saved."""
    pair = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    factor = torch.ones(2, requires_grad=True)
    variance, mean = reductions.of_moments(reductions._apart(Moments(pair[0], pair[1])), VAR, 5, 0.0)
    assert mean is not None
    saved = (mean * factor).sum()
    variance.mul_(factor)
    (grad,) = torch.autograd.grad(saved, factor)
    assert grad.tolist() == [1.0, 2.0] and variance.requires_grad
