"""What the split and the scaled product may be off by, derived; docs/numerics.md tells the same in words.

All are multiples of |A||B| = ``|x| @ |weight|.T``, for sums of K products; eps = 2^-24.

**Slices.** A scaled element s of at least 2^-14 is ``hi + 2^-11 lo`` but for 2^-22 |s|; the dropped
``lo * lo`` is at most 2^-22 of its product: ``3 * 2^-22`` for both operands, 12 eps. (8 eps are reached, on any K,
by matrices made for it.)

**Range.** An element below 2^-14 is off by at most 2^-36, and what it leaves to ``lo`` is at most 2^-25, so that
the dropped product adds 2^-36 more: for K such elements on both sides at most ``4 K 2^-36 max``, where max is the
other row's largest, and a row's largest is at least 2^13. The guard lets a pair of rows pass if at least ``need =
max(1, K // 64)`` positions have both factors within 2^-8 of their rows' largest, hence ``|A||B| >= need 2^-16 2^13
max``: the error is at most ``4 K 2^-33 / need`` of it, and K / need < 128: 1 eps. The scaled product loses 2^-25 of
such an element, on both sides ``2 K 2^-25 max``: 2^-14 by the same reasoning.

The fixup accepts other pairs with T such elements if the scaled ``|x| |w|`` add up to at least 2^18 T over an eighth of
K. A scaled element is below 2^15, so that T of them lose at most ``T 2^-35 2^15``, 2^-38 of the sum; one slice loses
``T 2^-25 2^15``, 2^-28 of it. Both are below the bounds above.

**Accumulation.** One MMA adds 16 products to an accumulator. Each of the 17 terms loses less than one unit of the
last of 24 places of the largest of them, 2^-23 of it. Promoted every 64 (four MMAs), the large products lose ``68 *
2 eps``, and every promotion rounds once: ``ceil(K / 64) eps``. The kernels do that from K = 4096 on; below they promote
every 32, which loses ``34 * 2 eps`` and rounds ``ceil(K / 32)`` times: at most as much in all, so that one bound covers
both. The 2K small products are never promoted; lo is kept
2^11 larger, ``|lo hi| <= |a||b|``, and the factor 2^-11 leaves ``(2K + K/8) 2^-9 eps``. The fused multiply-add that
joins both sums rounds once more.

The mma.sync kernels promote every 32 at every K, which loses ``34 * 2 eps`` and rounds ``ceil(K / 32)`` times, and join
both sums at each promotion, which rounds to 1 eps in all. In the tile of 128 rows that is within the bound of the other
kernels up to K = 5000; in that of 64 rows, whose promotions are added up in blocks of 512, at every K.
"""

from __future__ import annotations

EPS = 2.0**-24
MMA_K = 16
PROMOTION = 64  # of a long sum; see above for short ones
SPLIT_SLICES = 3 * 2.0**-22
SPLIT_RANGE = 2.0**-24
SCALED_SLICES = 2 * 2.0**-11 + 2.0**-22
SCALED_RANGE = 2.0**-14


def _tensor_cores(k: int) -> float:
    """Truncated sums of k products: one loss for each product, and one for the accumulator of each MMA."""
    return 2 * EPS * (k + -(-k // MMA_K))


def split(k: int) -> float:
    """Bound of |error| / |A||B| of the split product, guard included, whether promoted every 32 or every 64."""
    promoted = _tensor_cores(min(k, PROMOTION)) + EPS * (-(-k // PROMOTION) + 1)
    small = 2.0**-11 * 2 * _tensor_cores(2 * k)
    return SPLIT_SLICES + SPLIT_RANGE + (promoted + small) * (1 + SPLIT_SLICES)


def scaled(k: int) -> float:
    """Bound of |error| / |A||B| of the scaled product, whether or not its sums are promoted."""
    promotions = EPS * (-(-k // PROMOTION) + 1)
    return SCALED_SLICES + SCALED_RANGE + (_tensor_cores(k) + promotions) * (1 + SCALED_SLICES)


def sgemm(k: int) -> float:
    """Bound of |error| / |A||B| of any fp32 sum of fp32 products, rounded to nearest."""
    return k * EPS / (1 - k * EPS)
