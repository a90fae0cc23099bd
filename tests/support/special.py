"""Infinities, NaN, subnormal numbers, zeros and overflow: float64 says what must stand where.

Each case is small and has one thing in it. The finite results of a case are held to the bound of a plain fp32 sum
or of the split, whichever is larger, and what is NaN or infinite must be so at the same places, with the same sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Special:
    """One case; `change` plants in plain operands what may make trouble."""

    name: str
    change: Callable[[Tensor, Tensor], Pair]

    def make(self, device: torch.device) -> Pair:
        """x [M, K] and weight [N, K], the same at every call."""
        # No element is zero or tiny beside its row's largest.
        draw = Draw.seeded(len(self.name), device)
        x, weight = draw.uniform(M, K, 0.5, 2.0), draw.uniform(N, K, 0.5, 2.0)
        signs = [torch.sign(draw.normal(rows, K)) for rows in (M, N)]
        return self.change(x * signs[0], weight * signs[1])


def _put(operand: int, row: int, column: int, value: float) -> Callable[[Tensor, Tensor], Pair]:
    def change(x: Tensor, weight: Tensor) -> Pair:
        matrix = (x, weight)[operand]
        matrix[min(row, matrix.shape[0] - 1), column] = value
        return x, weight

    return change


def _at_every_position() -> Iterator[Special]:
    """Each special value in x and in the weight, at the edges of tiles, steps of K and matrices."""
    for name, value in SPECIALS.items():
        for operand, matrix in enumerate(("x", "weight")):
            for index, row in enumerate(ROWS):
                column = COLUMNS[index % len(COLUMNS)]
                yield Special(f"{name} in {matrix}[{row}, {column}]", _put(operand, row, column, value))


def _meeting(x_value: float, weight_value: float) -> Callable[[Tensor, Tensor], Pair]:
    """Both values at one k, for row 7 of x and row 9 of the weight."""
    return lambda x, weight: _put(1, 9, 100, weight_value)(*_put(0, 7, 100, x_value)(x, weight))


def _cancelling(x: Tensor, weight: Tensor) -> Pair:
    """inf - inf within one sum; rows 8 and 9 have one infinity each."""
    x[7, 3], x[7, 300] = math.inf, -math.inf
    x[8, 3], x[9, 300] = math.inf, -math.inf
    return x, weight.abs_()


def _everywhere(x: Tensor, weight: Tensor) -> Pair:
    """One row of nothing but NaN, one of infinities, a weight's row of both."""
    x[5], x[200], weight[11] = math.nan, math.inf, -math.inf
    weight[11, ::2] = math.nan
    return x, weight


def _zero_rows(x: Tensor, weight: Tensor) -> Pair:
    """Rows of zeros, negative ones too, also against an infinity."""
    x[[0, 131, M - 1]] = 0.0
    x[40], weight[3], weight[N - 1] = -0.0, 0.0, 0.0
    weight[20, 17] = math.inf
    return x, weight


def _scaled(x_exponent: int, weight_exponent: int) -> Callable[[Tensor, Tensor], Pair]:
    """Every element scaled: what a sum of scale exponents must survive."""
    return lambda x, weight: (_ldexp(x, x_exponent), _ldexp(weight, weight_exponent))


def _ldexp(values: Tensor, exponent: int) -> Tensor:
    """values * 2^exponent, rounded once: 2^exponent itself may be no fp32 number."""
    return torch.ldexp(values.double(), torch.tensor(exponent, device=values.device)).float()


def _subnormal_rows(x: Tensor, weight: Tensor) -> Pair:
    """Some rows consist of subnormal numbers; the other operand is large, so results are ordinary."""
    x[:50] = _ldexp(x[:50], -130)
    x[3] = SUBNORMAL_STEP
    return x, _ldexp(weight, 100)


def _subnormal_elements(x: Tensor, weight: Tensor) -> Pair:
    """Subnormal elements decide a result although their row holds far larger ones: those meet zeros."""
    x, weight = _ldexp(x.abs(), -130), _ldexp(weight.abs(), 100)
    x[::3, 5], weight[:, 5] = 2.0**100, 0.0
    return x, weight


def _lost_below_the_scale(x: Tensor, weight: Tensor) -> Pair:
    """Elements that underflow to zero when their row is scaled, against the largest of the weight."""
    x[10], weight = _ldexp(x[10], -45), _ldexp(weight, 60)
    x[10, 0], weight[:, 0] = 2.0**127, 0.0
    return x, weight


def _ends_of_range(x: Tensor, weight: Tensor) -> Pair:
    """Columns of x span all exponents, those of the weight the inverse: every product is ordinary."""
    exponents = torch.linspace(-120, 120, K, device=x.device).round().long()
    return torch.ldexp(x.double(), exponents).float(), torch.ldexp(weight.double(), -exponents).float()


def _overflowing_rows(x: Tensor, weight: Tensor) -> Pair:
    """Results of some rows exceed fp32, those of their neighbours do not."""
    x, weight = _ldexp(x.abs(), 54), _ldexp(weight.abs(), 62)
    x[[0, 128, M - 1]] *= 2.0**10
    return x, weight


def _largest_numbers(x: Tensor, weight: Tensor) -> Pair:
    """The largest fp32 number, as masks hold it: against zeros, and against weights that bring it back."""
    x, weight = _ldexp(x, 20), _ldexp(weight, -20)
    x[4, 6], x[290, 511] = LARGEST, -LARGEST
    weight[:, 6], weight[:, 511] = 0.0, 2.0**-40
    return x, weight


CASES = [
    *_at_every_position(),
    Special("inf against 0", _meeting(math.inf, 0.0)),
    Special("0 against -inf", _meeting(0.0, -math.inf)),
    Special("inf against -inf", _meeting(math.inf, -math.inf)),
    Special("NaN against inf", _meeting(math.nan, math.inf)),
    Special("NaN against 0", _meeting(math.nan, 0.0)),
    Special("inf against a subnormal", _meeting(math.inf, SUBNORMAL_STEP)),
    Special("inf - inf", _cancelling),
    Special("whole rows of NaN and inf", _everywhere),
    Special("rows of zeros", _zero_rows),
    Special("subnormal rows", _subnormal_rows),
    Special("subnormal elements", _subnormal_elements),
    Special("elements lost below the scale", _lost_below_the_scale),
    Special("exponents from end to end", _ends_of_range),
    Special("overflow in some rows", _overflowing_rows),
    Special("the largest numbers", _largest_numbers),
    *(
        Special(f"scales 2^{a} and 2^{b}", _scaled(a, b))
        for a, b in ((-70, -70), (-126, 110), (110, -126), (-100, -60), (60, 55))
    ),
]


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
