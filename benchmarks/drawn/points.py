"""Which shapes are drawn: by a seed alone, the same on every machine."""

from __future__ import annotations

import random

from benchmarks.cases import Shape

LAYERS = ((8192, 8192), (4096, 4096), (11008, 4096), (4096, 11008))
"""(N, K) of the points between powers of two."""

ROWS = (1, 20000)
LARGEST_SIDE = 14400
PRODUCT = (1e7, 6e11)
"""Of M, N and K: from what a launch costs to about a millisecond of 16-bit products."""

ROWS_PER_LAYER, JUST_ABOVE = 18, 6
_ALIGNED = 8
_MISALIGNED_SHARE = 0.1


def draw(seed: int, count: int) -> list[Shape]:
    """Random shapes; fewer of the same seed are the first of them.

    M is log-uniform. N and K are uniform multiples of 8, but for one point in ten.
    """
    rng = random.Random(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        shape = _shape(rng)
        if PRODUCT[0] <= shape.m * shape.n * (shape.k or 0) <= PRODUCT[1]:
            shapes[shape] = None
    return list(shapes)


def between(seed: int) -> list[Shape]:
    """M between powers of two on four layers, a third of it just above one: 260, 520."""
    rng = random.Random(f"between {seed}")
    shapes = []
    for n, k in LAYERS:
        rows: set[int] = set()
        while len(rows) < ROWS_PER_LAYER:
            m = _just_above(rng) if len(rows) < JUST_ABOVE else _rows(rng)
            if m & (m - 1):
                rows.add(m)
        shapes += [Shape(m, n, k) for m in sorted(rows)]
    return shapes


# Of a generator, only random() is promised to stay the same from one Python to the next.


def _below(rng: random.Random, count: int) -> int:
    return int(rng.random() * count)


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _rows(rng: random.Random) -> int:
    return min(int(_log_uniform(rng, ROWS[0], ROWS[1] + 1)), ROWS[1])


def _just_above(rng: random.Random) -> int:
    """At most a thirty-second above a power of two, from 33 on."""
    power = 32 << _below(rng, 9)
    return power + 1 + _below(rng, power // 32)


def _shape(rng: random.Random) -> Shape:
    m = _rows(rng)
    n, k = (_ALIGNED * (1 + _below(rng, LARGEST_SIDE // _ALIGNED)) for _ in range(2))
    if rng.random() >= _MISALIGNED_SHARE:
        return Shape(m, n, k)
    return Shape(m, _misaligned(rng, n), k) if _below(rng, 2) else Shape(m, n, _misaligned(rng, k))


def _misaligned(rng: random.Random, side: int) -> int:
    """Odd, or a multiple of 2 and not of 8: as often the one as the other."""
    offset = 2 + 2 * _below(rng, 3) if _below(rng, 2) else 1 + 2 * _below(rng, 4)
    return max(side, 2 * _ALIGNED) - offset
