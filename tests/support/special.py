"""Infinities, NaN, subnormal numbers, zeros and overflow: float64 says what must stand where.

Each case is small and has one thing in it. The finite results of a case are held to the bound of a plain fp32 sum
or of the split, whichever is larger, and what is NaN or infinite must be so at the same places, with the same sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gradings import bounds
from benchmarks.gradings.data import Draw, Pair
from benchmarks.gradings.measures import Exact
from benchmarks.gradings.products import Product
from tests.support.exact import Verdict

M, N, K = 300, 264, 512
ROWS = (0, 127, 128, 255, M - 1)
COLUMNS = (0, 63, 64, K - 1)
SPECIALS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
LARGEST = torch.finfo(torch.float32).max
SUBNORMAL_STEP = 2.0**-149
EXACT_ENOUGH = max(bounds.sgemm(K), bounds.split(K))


# A name, and what is done to plain operands: x [M, K] and weight [N, K].
_TEXTS = """
inf against 0 => x[7, 100], weight[9, 100] = inf, 0.0
0 against -inf => x[7, 100], weight[9, 100] = 0.0, -inf
inf against -inf => x[7, 100], weight[9, 100] = inf, -inf
NaN against inf => x[7, 100], weight[9, 100] = nan, inf
NaN against 0 => x[7, 100], weight[9, 100] = nan, 0.0
inf against a subnormal => x[7, 100], weight[9, 100] = inf, SUBNORMAL_STEP
inf - inf => x[7, 3], x[7, 300], x[8, 3], x[9, 300] = inf, -inf, inf, -inf; weight = weight.abs()
whole rows of NaN and inf => x[5], x[200], weight[11] = nan, inf, -inf; weight[11, ::2] = nan
rows of zeros => x[[0, 131, M - 1]] = 0.0; x[40], weight[3], weight[N - 1] = -0.0, 0.0, 0.0; weight[20, 17] = inf
subnormal rows => x[:50] = ldexp(x[:50], -130); x[3] = SUBNORMAL_STEP; weight = ldexp(weight, 100)
subnormal elements => x, weight = ldexp(x.abs(), -130), ldexp(weight.abs(), 100); x[::3, 5], weight[:, 5] = 2.0**100, 0.0
elements lost below the scale => x[10] = ldexp(x[10], -45); weight = ldexp(weight, 60); x[10, 0], weight[:, 0] = 2.0**127, 0.0
exponents from end to end => e = steps(x); x, weight = torch.ldexp(x.double(), e).float(), torch.ldexp(weight.double(), -e).float()
overflow in some rows => x, weight = ldexp(x.abs(), 54), ldexp(weight.abs(), 62); x[[0, 128, M - 1]] *= 2.0**10
the largest numbers => x, weight = ldexp(x, 20), ldexp(weight, -20); x[4, 6], x[290, 511] = LARGEST, -LARGEST; weight[:, 6], weight[:, 511] = 0.0, 2.0**-40
"""  # noqa: E501
_SCALES = ((-70, -70), (-126, 110), (110, -126), (-100, -60), (60, 55))


@dataclass(frozen=True)
class Special:
    """One case: `change` plants in plain operands what may make trouble."""

    name: str
    change: str

    def make(self, device: torch.device) -> Pair:
        """x [M, K] and weight [N, K], the same at every call."""
        # No element is zero or tiny beside its row's largest.
        draw = Draw.seeded(len(self.name), device)
        x, weight = draw.uniform(M, K, 0.5, 2.0), draw.uniform(N, K, 0.5, 2.0)
        signs = [torch.sign(draw.normal(rows, K)) for rows in (M, N)]
        scope = {
            **globals(),
            "inf": math.inf,
            "nan": math.nan,
            "x": x * signs[0],
            "weight": weight * signs[1],
        }
        exec(self.change, scope)
        return scope["x"], scope["weight"]


def ldexp(values: Tensor, exponent: int) -> Tensor:
    """values * 2^exponent, rounded once: 2^exponent itself may be no fp32 number."""
    return torch.ldexp(values.double(), torch.tensor(exponent, device=values.device)).float()


def steps(x: Tensor) -> Tensor:
    """Exponents of columns from end to end of fp32's range; beside their inverse every product is ordinary."""
    return torch.linspace(-120, 120, K, device=x.device).round().long()


def _cases() -> Iterator[Special]:
    """Special values in x and in the weight, at the edges of tiles, steps of K and matrices; the texts; scales."""
    for name, value in SPECIALS.items():
        for matrix, rows in (("x", M), ("weight", N)):
            for index, row in enumerate(ROWS):
                column = COLUMNS[index % len(COLUMNS)]
                change = f"{matrix}[{min(row, rows - 1)}, {column}] = {value}"
                yield Special(f"{name} in {matrix}[{row}, {column}]", change)
    for line in _TEXTS.strip().splitlines():
        yield Special(*line.split(" => "))
    for a, b in _SCALES:
        yield Special(f"scales 2^{a} and 2^{b}", f"x, weight = ldexp(x, {a}), ldexp(weight, {b})")


CASES = list(_cases())


def misplaced_entries(result: Tensor, exact: Exact, relative: float) -> Tensor:
    """Where `result` is not what float64 says, bool.

    Args:
        result: fp32.
        exact: the reference of the same operands.
        relative: the bound of |error| / |A||B| for entries that are finite. Subnormal products may cost one step each.
    """
    expected, actual = exact.product, result.double()
    allowed = exact.magnitude * relative + K * SUBNORMAL_STEP
    right = (actual - expected).abs() <= allowed
    right = torch.where(expected.abs() > LARGEST, actual == torch.sign(expected) * math.inf, right)
    right = torch.where(expected.isnan(), actual.isnan(), right)
    return ~right


def misplaced(result: Tensor, exact: Exact, relative: float) -> int:
    """How many entries are not what float64 says; arguments as of `misplaced_entries`."""
    return int(misplaced_entries(result, exact, relative).sum())


def misplaced_by_us(ours: Product, baseline: Product, x: Tensor, weight: Tensor, relative: float) -> int:
    """Entries that `ours` misplaces and `baseline` does not.

    At `high` TF32 may answer: it has no number between 2^128 - 2^117 and infinity, and few subnormal ones.
    """
    exact = Exact.of(x, weight)
    wrong = [misplaced_entries(product(x, weight), exact, relative) for product in (ours, baseline)]
    return int((wrong[0] & ~wrong[1]).sum())


def special_verdicts(
    product: Product, device: torch.device, relative: float = EXACT_ENOUGH
) -> Iterator[Verdict]:
    """Every case; `relative` as in `misplaced_entries`."""
    for case in CASES:
        x, weight = case.make(device)
        wrong = misplaced(product(x, weight), Exact.of(x, weight), relative)
        yield Verdict(f"special: {case.name}", wrong, 0)
