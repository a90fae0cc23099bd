"""The test of the choice: shapes drawn at random, so that nothing can have been tuned to them.

Shapes follow from a seed alone, the same on every machine. A `Series` is one case at all its shapes, with its baselines
and the bar that every shape is held to. Those of a short K are in `short`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.cases import Problem, Setting, Shape, matching
from benchmarks.cases.problems import problems
from benchmarks.harness.records import ADDMM, COMPILE, EAGER, OURS, PLAIN

SMALL_US, BEHIND_US = 10.0, 1.0
"""Where we or the best baseline take less than the first, a point may be the second behind, whatever the ratio."""

DRAWN, BETWEEN = "drawn", "between"
NO_SLICES = "needs a GPU: nothing runs on fp16 slices elsewhere"
_SIGMOID = "sigmoid_scale_residual"
_BF16, _FP16 = Setting("bf16", "highest"), Setting("fp16", "highest")
_HIGHEST, _HIGH = Setting("fp32", "highest"), Setting("fp32", "high")


@dataclass(frozen=True)
class Series:
    """One case: a problem in one arithmetic at all points, one way of ours to call it.

    Attributes:
        name: of the case, part of the records' format.
        epilogue: of the linear layer.
        bar: the least ratio, the best baseline's time over ours, that a point from `SMALL_US` on is to have.
        own: which call of ours.
        on_slices: it makes no sense where nothing runs on fp16 slices.
        shapes: which ones: `DRAWN`, or `BETWEEN` powers of two.
    """

    name: str
    epilogue: str
    setting: Setting
    bar: float
    own: str = OURS
    on_slices: bool = False
    shapes: str = DRAWN

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return next(p for p in problems() if p.name == f"linear/{self.epilogue}")

    @property
    def baselines(self) -> tuple[str, ...]:
        """What the ratio is to, the best of them."""
        return (EAGER, ADDMM) if self.epilogue == "bias_relu" else (EAGER, COMPILE)

    def best(self, us: Mapping[str, float]) -> str:
        """The fastest baseline of one turn-taking; empty without any."""
        return min((name for name in self.baselines if name in us), key=lambda name: us[name], default="")

    def small(self, us: Mapping[str, float]) -> bool:
        """Whether a point is held to microseconds, not to a ratio."""
        return min(us[name] for name in (self.own, *self.baselines) if name in us) < SMALL_US

    def behind_us(self, us: Mapping[str, float]) -> float:
        """How much more a point takes us than the best baseline; below 0 where it takes less."""
        return us[self.own] - us[self.best(us)]

    def ratio(self, us: Mapping[str, float], *others: str) -> float | None:
        """The time of another (by default of the best baseline) over ours; None where one is missing."""
        other = others[0] if others else self.best(us)
        return us[other] / us[self.own] if other in us and self.own in us else None

    def why_missed(self, shape: Shape, us: Mapping[str, float]) -> str:
        """The bar that a point is below, if any; here it is the same at every shape."""
        ratio = self.ratio(us)
        if ratio is None:
            return ""
        if self.small(us):
            behind = self.behind_us(us)
            return f"{behind:.2f} us behind {self.best(us)}" if behind > BEHIND_US else ""
        return f"{ratio:.3f} of {self.best(us)}, wanted {self.bar:g}" if ratio < self.bar else ""


SERIES = (
    Series("bias_relu/bf16", "bias_relu", _BF16, 0.95),
    Series("bias_relu/fp16", "bias_relu", _FP16, 0.95),
    Series("sigmoid_scale_residual/bf16", _SIGMOID, _BF16, 0.97),
    Series("bias_relu/fp32_highest_packed", "bias_relu", _HIGHEST, 0.97, on_slices=True),
    Series("bias_relu/fp32_highest_plain", "bias_relu", _HIGHEST, 0.97, own=PLAIN),
    Series("bias_relu/fp32_high", "bias_relu", _HIGH, 0.93, on_slices=True),
    Series("between/bias_relu/bf16", "bias_relu", _BF16, 0.95, shapes=BETWEEN),
    Series("between/sigmoid_scale_residual/bf16", _SIGMOID, _BF16, 0.95, shapes=BETWEEN),
)


def select(patterns: Sequence[str], *, count: int, between: bool) -> list[Series]:
    """The cases of a run.

    Args:
        patterns: see `benchmarks.cases.matching`; none: all.
        count: of random points; without any, their cases are left out.
        between: with the points between powers of two.

    Raises:
        ValueError: a pattern matches no case, or nothing is left.
    """
    names = matching([series.name for series in SERIES], patterns, "with --random")
    chosen = [s for s in SERIES if s.name in names and (between if s.shapes == BETWEEN else count > 0)]
    if not chosen:
        raise ValueError("--random: no case is left")
    return chosen


def groups(chosen: Sequence[Series]) -> list[list[Series]]:
    """Cases that are measured in turn with each other: they share their baselines."""
    return [list(group) for _, group in groupby(chosen, key=lambda s: (s.shapes, s.epilogue, str(s.setting)))]


# --- the shapes --------------------------------------------------------------------------------------------------

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


def below(rng: random.Random, count: int) -> int:
    """One of so many numbers, from 0 on."""
    return int(rng.random() * count)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """From low to high, each octave as likely as any other."""
    return float(low * (high / low) ** rng.random())


def _rows(rng: random.Random) -> int:
    return min(int(log_uniform(rng, ROWS[0], ROWS[1] + 1)), ROWS[1])


def _just_above(rng: random.Random) -> int:
    """At most a thirty-second above a power of two, from 33 on."""
    power = 32 << below(rng, 9)
    return power + 1 + below(rng, power // 32)


def _shape(rng: random.Random) -> Shape:
    m = _rows(rng)
    n, k = (_ALIGNED * (1 + below(rng, LARGEST_SIDE // _ALIGNED)) for _ in range(2))
    if rng.random() >= _MISALIGNED_SHARE:
        return Shape(m, n, k)
    return Shape(m, _misaligned(rng, n), k) if below(rng, 2) else Shape(m, n, _misaligned(rng, k))


def _misaligned(rng: random.Random, side: int) -> int:
    """Odd, or a multiple of 2 and not of 8: as often the one as the other."""
    offset = 2 + 2 * below(rng, 3) if below(rng, 2) else 1 + 2 * below(rng, 4)
    return max(side, 2 * _ALIGNED) - offset
