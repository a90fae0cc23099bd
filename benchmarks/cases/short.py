"""Layers with a short K, where the epilogue takes a good part of the time: random shapes, and what each is held to.

The bare product is the measure. A kernel that hides its epilogue takes as long; where that reads a matrix, too, as long
as its bytes take at least.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cases import MATRIX, Case, Problem, Setting, Shape, matching
from benchmarks.cases.custom import problems
from benchmarks.cases.random import BEHIND_US, SMALL_US, Series, below, log_uniform
from benchmarks.harness.records import EAGER, MM

EPILOGUES = ("bias_relu", "sigmoid_scale", "bias_gelu", "bias_gelu_tanh", "bias_silu", "residual")
SETTINGS = (Setting("bf16", "highest"), Setting("fp16", "highest"))

GEOMEAN, WORST = 0.97, 0.90
"""The time of the bare product over ours, where it has at least `WAVES` waves of tiles."""
MOST_BEHIND_US = 2.0
"""Elsewhere: how much longer ours may take."""
EAGER_AHEAD = 1.02
"""The most of eager's time that ours may take; below `SMALL_US`, `BEHIND_US` more."""
WAVES, TILE = 2, (128, 256)
BYTES_PER_US = 4.3e6
"""What an epilogue that reads a matrix is granted."""


@dataclass(frozen=True)
class Point:
    """A layer, and how long each alternative took.

    Attributes:
        own: which of them is ours.
    """

    case: Case
    us: Mapping[str, float]
    own: str

    @property
    def bare_us(self) -> float:
        """What ours is held to."""
        reads_matrix = any(operand.kind == MATRIX for operand in self.case.problem.operands.values())
        return max(self.us[MM], self.case.bytes / BYTES_PER_US if reads_matrix else 0.0)

    @property
    def ratio(self) -> float:
        """The same over ours."""
        return self.bare_us / self.us[self.own]

    @property
    def behind_us(self) -> float:
        """How much longer ours takes."""
        return self.us[self.own] - self.bare_us

    @property
    def vs_eager(self) -> float | None:
        """Eager's time over ours, as far as there is one."""
        return self.us[EAGER] / self.us[self.own] if EAGER in self.us else None

    def why_missed(self, multiprocessors: int) -> str:
        """The bar that it is below, if any."""
        if has_waves(self.case.shape, multiprocessors):
            if self.ratio < WORST:
                return f"{self.ratio:.3f} of the bare product, wanted {WORST:g}"
        elif self.behind_us > MOST_BEHIND_US:
            return f"{self.behind_us:.2f} us behind the bare product, at most {MOST_BEHIND_US:g} wanted"
        return self._why_behind_eager()

    def _why_behind_eager(self) -> str:
        eager, mine = self.us.get(EAGER), self.us[self.own]
        if eager is None:
            return ""
        if min(eager, mine) < SMALL_US:
            return f"{mine - eager:.2f} us behind eager" if mine - eager > BEHIND_US else ""
        return f"{mine / eager:.3f} of eager's time" if mine > EAGER_AHEAD * eager else ""


def has_waves(shape: Shape, multiprocessors: int) -> bool:
    """Whether the result fills the GPU with tiles `WAVES` times."""
    rows, columns = -(-shape.m // TILE[0]), -(-shape.n // TILE[1])
    return rows * columns >= WAVES * multiprocessors


@dataclass(frozen=True)
class ShortSeries(Series):
    """One epilogue in one type at all points, as one Python function.

    Attributes:
        multiprocessors: of the GPU.
    """

    bar: float = field(default=WORST)
    multiprocessors: int = 0

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return problems()[self.epilogue]

    @property
    def baselines(self) -> tuple[str, ...]:
        """What turns are compared by."""
        return (MM,)

    def point(self, shape: Shape, us: Mapping[str, float]) -> Point | None:
        """A point of the series; None where ours or the bare product has no time."""
        known = self.own in us and MM in us
        return Point(Case(self.problem, shape, self.setting), us, self.own) if known else None

    def misses_at(self, shape: Shape, us: Mapping[str, float]) -> bool:
        """Whether a point is below one of its bars."""
        found = self.point(shape, us)
        return found is not None and bool(found.why_missed(self.multiprocessors))


def select(patterns: Sequence[str], multiprocessors: int) -> list[ShortSeries]:
    """The cases of a run, by the patterns of `benchmarks.cases.matching`; none: all.

    Raises:
        ValueError: a pattern matches no case.
    """
    every = {
        f"{epilogue}/{setting}": ShortSeries(
            f"{epilogue}/{setting}", epilogue, setting, multiprocessors=multiprocessors
        )
        for epilogue in EPILOGUES
        for setting in SETTINGS
    }
    return [every[name] for name in matching(list(every), patterns, "with --short")]


# --- the shapes -------------------------------------------------------------------------------------------------------

ROWS, COLUMNS, DEPTH = (16, 200_000), (48, 4096), (48, 2048)
PRODUCT = (1e7, 2e11)
"""Of M, N and K."""
LARGEST_RESULT = 4e8
_ALIGNED = 8
_ODD_SHARE = 1 / 7


def draw(seed: int, count: int) -> list[Shape]:
    """Random shapes; fewer of the same seed are the first of them.

    M, N and K are log-uniform. N and K are multiples of 8, but at one point in seven, where one of them is odd.
    """
    rng = random.Random(f"short {seed}")
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        shape = _shape(rng)
        product = shape.m * shape.n * (shape.k or 0)
        if PRODUCT[0] <= product <= PRODUCT[1] and shape.m * shape.n < LARGEST_RESULT:
            shapes[shape] = None
    return list(shapes)


def _shape(rng: random.Random) -> Shape:
    m = int(log_uniform(rng, ROWS[0], ROWS[1] + 1))
    sides = [_side(rng, *limits) for limits in (COLUMNS, DEPTH)]
    if rng.random() < _ODD_SHARE:
        which = below(rng, 2)
        sides[which] += 1 if sides[which] == (COLUMNS, DEPTH)[which][0] else -1
    return Shape(min(m, ROWS[1]), *sides)


def _side(rng: random.Random, low: int, high: int) -> int:
    """A multiple of 8 between two of them."""
    return min(_ALIGNED * int(log_uniform(rng, low, high + _ALIGNED) / _ALIGNED), high)
