"""The gradings themselves, on a CPU: references are right, and inaccurate products fail."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gradings import bounds, cli, data, sweep
from benchmarks.gradings.bounds import EPS
from benchmarks.gradings.measures import Errors, Exact, errors, ratios
from benchmarks.gradings.products import Product
from tests.support import exact, special
from tests.support import split_emulation as emulation

CPU = torch.device("cpu")
SMALL = (48, 40)


def mm(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def split_rounded(x: Tensor, weight: Tensor) -> Tensor:
    """The split with exact sums: what its pieces lose, and nothing else."""
    return emulation.split_product(x, weight, tensor_cores=False)


def unguarded(x: Tensor, weight: Tensor) -> Tensor:
    return emulation.split_product(x, weight, tensor_cores=False, guard=False)


def fixed_point(x: Tensor, weight: Tensor) -> Tensor:
    """Rows as 28-bit integers of one scale each, multiplied exactly: accurate in norm, blind to small elements."""
    rounded = []
    for matrix in (x, weight):
        step = matrix.abs().amax(1, keepdim=True).double() * 2.0**-28
        rounded.append((matrix.double() / step).round() * step)
    return (rounded[0] @ rounded[1].T).float()


def passed(verdicts: Any) -> dict[str, bool]:
    return {verdict.name: verdict.ok for verdict in verdicts}


def test_measures_of_a_known_error() -> None:
    x, weight = data.BY_NAME["positive"].make(8, 8, 16, 0, CPU)
    exact_ = Exact.of(x, weight)
    wrong = exact_.product * (1 + 3 * EPS)
    found = errors(wrong, exact_)
    assert found.max_ratio == pytest.approx(3, rel=1e-6) and found.rms_ratio == pytest.approx(3, rel=1e-6)
    assert found.relative == pytest.approx(3 * EPS, rel=1e-6)
    norms = float(torch.linalg.matrix_norm(x.double()) * torch.linalg.matrix_norm(weight.double()))
    expected = 3 * float(torch.linalg.matrix_norm(exact_.product)) / (18**0.5 * norms)
    assert found.blas == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("product", [mm, split_rounded])
def test_demmel_passes_conventional_products(product: Product) -> None:
    found = passed(exact.demmel_verdicts(product, CPU, 128))
    assert len(found) == 1 + len(exact.CIRCULANT_SPREADS) and all(found.values()), found


@pytest.mark.parametrize("product", [fixed_point, unguarded])
def test_demmel_rejects_fixed_points(product: Product) -> None:
    """Two pieces under one scale are a fixed point too: without its guard the split fails like one."""
    found = list(exact.demmel_verdicts(product, CPU, 128))
    wide = [v for v in found if any(f"+-{spread}:" in v.name for spread in (40, 45, 50))]
    narrow = [v for v in found if "+-5:" in v.name or "zeros" in v.name]
    assert len(wide) == 3 and not any(v.ok for v in wide)
    assert len(narrow) == 2 and all(v.ok for v in narrow)


@pytest.mark.parametrize(
    ("product", "right"),
    [(mm, True), (split_rounded, True), (emulation.tf32_product, True), (lambda x, w: mm(x, w) + 0.5, False)],
)
def test_integers(product: Product, right: bool) -> None:
    found = passed(exact.integer_verdicts(product, CPU, 24))
    assert set(found.values()) == {right}


@pytest.mark.every(5)
@pytest.mark.parametrize("case", special.CASES, ids=lambda case: case.name)
def test_special_values_have_one_right_answer(case: special.Special) -> None:
    """The rounded float64 product passes, the emulated split too; a result with anything misplaced does not."""
    x, weight = case.make(CPU)
    exact_ = Exact.of(x, weight)
    assert special.misplaced(exact_.product.float(), exact_, special.EXACT_ENOUGH) == 0
    assert special.misplaced(split_rounded(x, weight), exact_, special.EXACT_ENOUGH) == 0
    spoiled = exact_.product.float()
    spoiled[5, 5] = 1.0 if not bool(spoiled[5, 5].isfinite()) else math.nan
    spoiled[6, 6] = -spoiled[6, 6] if bool(spoiled[6, 6] != 0) else 1.0
    assert special.misplaced(spoiled, exact_, special.EXACT_ENOUGH) == 2


@pytest.mark.parametrize(
    "name",
    [
        "subnormal elements",
        "elements lost below the scale",
        "exponents from end to end",
        "the largest numbers",
    ],
)
def test_special_values_need_the_guard(name: str) -> None:
    case = next(case for case in special.CASES if case.name == name)
    x, weight = case.make(CPU)
    assert special.misplaced(unguarded(x, weight), Exact.of(x, weight), special.EXACT_ENOUGH) > 0


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-149, 127))
def test_pieces_keep_what_the_bound_says(value: float, exponent: int) -> None:
    """22 bits of elements from 2^-14 on, an absolute 2^-36 below; scales are even powers of two in range."""
    x = torch.tensor([[value, math.ldexp(1.0, exponent)]])
    pieces = emulation.split(x)
    e = int(pieces.exponents)
    assert e % 2 == 0 and emulation.EXPONENT_RANGE[0] <= e <= emulation.EXPONENT_RANGE[1]
    scaled = torch.ldexp(x.double(), pieces.exponents)
    lost = (scaled - pieces.high - pieces.low / emulation.LOW_SCALE).abs()
    assert bool((lost <= torch.maximum(scaled.abs() * 2.0**-22, torch.tensor(2.0**-36))).all())
    largest = float(scaled.abs().max())
    assert 2.0**13 <= largest < 2.0**15 or e == emulation.EXPONENT_RANGE[1]


def adversarial(k: int, generator: torch.Generator) -> Tensor:
    """Rows of two magnitudes at random places, far apart and at the guard's edges, with awkward mantissas."""
    rows = 8
    gap = int(torch.randint(7, 60, (), generator=generator))
    share = float(torch.rand((), generator=generator))
    exponents = torch.where(torch.rand(rows, k, generator=generator) < share, -gap, 0)
    exponents -= torch.randint(0, 10, (rows, k), generator=generator)
    exponents[:, int(torch.randint(0, k, (), generator=generator))] = 0
    mantissas = torch.full((rows, k), exact.WORST_MANTISSA)
    if torch.rand((), generator=generator) < 0.5:
        mantissas = 1 + torch.rand(rows, k, generator=generator)
    return torch.ldexp(mantissas, exponents)


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 7, 63, 64, 127, 128, 300]))
def test_what_the_guard_lets_pass_is_accurate(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = adversarial(k, generator), adversarial(k, generator)
    ratio = ratios(unguarded(x, weight), Exact.of(x, weight))
    safe = ~emulation.unsafe_pairs(emulation.split(x), emulation.split(weight))
    limit = (bounds.SPLIT_SLICES + bounds.SPLIT_RANGE + EPS) / EPS
    assert bool((ratio[safe] <= limit).all())


@pytest.mark.parametrize("k", [64, 127, 128, 512, 4096])
def test_the_guards_edge(k: int) -> None:
    """The worst data that passes costs less than one eps by range; one position fewer, and the guard acts.

    The large elements stand at the end, where the sum of magnitudes does not see them.
    """
    x, weight = (matrix.flip(1) for matrix in exact.tightest_unguarded(k, CPU))
    a, b = emulation.split(x), emulation.split(weight)
    assert bool(a.tiny.all() and b.tiny.all()) and not bool(emulation.unsafe_pairs(a, b).any())
    assert float(ratios(unguarded(x, weight), Exact.of(x, weight)).max()) <= bounds.SPLIT_RANGE / EPS + 1
    x[:, -1] *= 0.5
    assert bool(emulation.unsafe_pairs(emulation.split(x), b).all())


def test_emulated_tensor_cores_stay_within_the_derived_bounds() -> None:
    for name in ("uniform_linear", "positive", "wide_20", "columns_15"):
        for k in (8, 64, 1000):
            x, weight = data.BY_NAME[name].make(*SMALL, k, 0, CPU)
            exact_ = Exact.of(x, weight)
            split = float(ratios(emulation.split_product(x, weight), exact_).max())
            scaled = float(ratios(emulation.scaled_product(x, weight), exact_).max())
            assert split <= bounds.split(k) / EPS and scaled <= bounds.scaled(k) / EPS
            assert scaled > 10 * split or name in ("wide_20", "columns_15"), "only repaired results agree"


def test_scaled_rounds_as_tf32_does() -> None:
    x, weight = data.BY_NAME["uniform_linear"].make(*SMALL, 256, 0, CPU)
    exact_ = Exact.of(x, weight)
    scaled = errors(emulation.scaled_product(x, weight), exact_)
    tf32 = errors(emulation.tf32_product(x, weight), exact_)
    assert scaled.rms_ratio == pytest.approx(tf32.rms_ratio, rel=0.01)


def point(
    k: int, ours: tuple[float, float], baseline: tuple[float, float], name: str = "normal"
) -> sweep.Point:
    made = {key: Errors(*pair, 0.0, 0.0, 0) for key, pair in (("split", ours), ("sgemm", baseline))}
    return sweep.Point(name, k, 1, made)


def test_threshold_is_where_every_larger_k_is_as_accurate() -> None:
    good, bad = ((1.0, 1.0), (1.0, 1.0)), ((1.01, 1.0), (1.0, 1.0))
    assert sweep.threshold([point(1, *bad), point(2, *good), point(4, *good)], "split") == 2
    assert sweep.threshold([point(1, *good), point(2, *bad), point(4, *good)], "split") == 4
    assert sweep.threshold([point(1, *good), point(2, *bad)], "split") is None
    assert sweep.threshold([point(2, (0.5, 1.31), (1.0, 1.0))], "split") is None
    assert sweep.threshold([point(2, (0.5, 1.29), (1.0, 1.0))], "split") == 2
    both = [point(2, *good), point(2, *bad, name="wide_20"), point(4, *good), point(4, *good, name="wide_20")]
    assert sweep.thresholds(both, "split") == {"normal": 2, "wide_20": 4, "all": 4}
    extreme = point(4, *bad, name=data.EXTREME[0].name)
    assert sweep.thresholds([*both, extreme], "split")["all"] == 4


def test_the_planner_asks_for_this_k() -> None:
    text = (Path(__file__).parents[2] / "csrc/gemm/fp16_slices/coverage.cpp").read_text(encoding="utf-8")
    assert re.findall(r"\bkLeastK = (\d+)[,;]", text) == [str(cli.LEAST_K)]
