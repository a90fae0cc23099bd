"""Layers with a short K, where the epilogue takes a good part of the time: of models and random ones, and their bars.

The bare product is the measure. A kernel that hides its epilogue takes as long; where that reads a matrix, too, as long
as its bytes take at least.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cases import MATRIX, Case, Problem, Setting, Shape, matching
from benchmarks.cases.custom import problems
from benchmarks.cases.random import BEHIND_US, DRAWN, SMALL_US, Series, below, log_uniform
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
OF_MODELS = "layers"
# Layers of transformers and recommenders. M is tokens, or rows of a batch.
LAYERS = {
    "BERT-base, 512 x 32 tokens, intermediate": Shape(16384, 3072, 768),
    "BERT-base, 128 x 32 tokens, attention output": Shape(4096, 768, 768),
    "BERT-large, 512 tokens, intermediate": Shape(512, 4096, 1024),
    "BERT-large, 384 x 8 tokens, attention output": Shape(3072, 1024, 1024),
    "ViT-B/16, 8 images, MLP": Shape(1576, 3072, 768),
    "ViT-B/16, 64 images, attention output": Shape(12608, 768, 768),
    "ViT-S/16, 64 images, MLP": Shape(12608, 1536, 384),
    "Swin-T, 64 images, third stage, MLP": Shape(12544, 1536, 384),
    "Swin-T, 64 images, fourth stage, MLP": Shape(3136, 3072, 768),
    "Mixer-B/16, 32 images, channels": Shape(6272, 3072, 768),
    "GPT-2, 1024 x 8 tokens, MLP": Shape(8192, 3072, 768),
    "GPT-2 medium, 1024 x 8 tokens, MLP": Shape(8192, 4096, 1024),
    "T5-small, 512 x 8 tokens, feed-forward": Shape(4096, 2048, 512),
    "Whisper base, 8 x 30 s, MLP": Shape(12000, 2048, 512),
    "FT-Transformer, 1024 rows x 32 features": Shape(32768, 512, 256),
    "DLRM, bottom MLP, 32768 rows": Shape(32768, 256, 512),
    "DLRM, top MLP, 32768 rows": Shape(32768, 1024, 1024),
    "DLRM, top MLP, 2048 rows": Shape(2048, 1024, 1024),
    "Wide & Deep, 50000 rows": Shape(50000, 512, 1024),
    "DeepFM, 10000 rows": Shape(10000, 400, 400),
}


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

    def bare_us(self, shape: Shape, us: Mapping[str, float]) -> float:
        """What ours is held to."""
        case = Case(self.problem, shape, self.setting)
        reads_matrix = any(operand.kind == MATRIX for operand in case.problem.operands.values())
        return max(us[MM], case.bytes / BYTES_PER_US if reads_matrix else 0.0)

    def why_missed(self, shape: Shape, us: Mapping[str, float]) -> str:
        """The bar that a point is below, if any."""
        if self.ratio(us) is None:
            return ""
        bare, mine = self.bare_us(shape, us), us[self.own]
        if has_waves(shape, self.multiprocessors):
            if bare / mine < self.bar:
                return f"{bare / mine:.3f} of the bare product, wanted {self.bar:g}"
        elif mine - bare > MOST_BEHIND_US:
            return f"{mine - bare:.2f} us behind the bare product, at most {MOST_BEHIND_US:g} wanted"
        eager = us.get(EAGER, mine)
        if min(eager, mine) < SMALL_US:
            return f"{mine - eager:.2f} us behind eager" if mine - eager > BEHIND_US else ""
        return f"{mine / eager:.3f} of eager's time" if mine > EAGER_AHEAD * eager else ""


def select(patterns: Sequence[str], multiprocessors: int, count: int = 1) -> list[ShortSeries]:
    """The cases of a run, by the patterns of `benchmarks.cases.matching`; none: all.

    At the layers of models bf16 alone, before the random shapes. Without random shapes their cases are left out.

    Raises:
        ValueError: a pattern matches no case, or nothing is left.
    """
    where = [("layers/", OF_MODELS, SETTINGS[:1]), ("", DRAWN, SETTINGS if count else ())]
    every = {
        (name := f"{start}{epilogue}/{setting}"): ShortSeries(
            name, epilogue, setting, shapes=shapes, multiprocessors=multiprocessors
        )
        for start, shapes, settings in where
        for epilogue in EPILOGUES
        for setting in settings
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
