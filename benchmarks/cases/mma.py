"""What ``--mma`` measures: every tile of the mma.sync kernels, without a functor and with two, at large shapes.

They are the kernels of GPUs since Ampere. Here they run under forced plans on whatever GPU there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases import CUSTOM, Case, Problem, Setting, Shape, custom
from benchmarks.harness.records import GELU, NO_FUNCTOR, RELU
from epigemm.arguments import precision
from epigemm.planning import dry_runs, plans

KIND, FAMILY = "mma", "sm80_mma"
SPLIT = Setting("fp32", "highest")
SETTINGS = (Setting("bf16", "highest"), Setting("fp32", "high"), Setting("fp16", "highest"), SPLIT)
LEAST_K, WAVES = 1024, 4
"""What a case has at least: so short a K, and so many waves of tiles."""
SHAPES = (
    Shape(8192, 8192, 8192),
    Shape(8192, 4096, 4096),
    Shape(4096, 11008, 4096),
    Shape(16384, 2048, 8192),
    Shape(12345, 5120, 2048),
    Shape(8192, 3072, 1024),
    Shape(16384, 4096, 1024),
    Shape(20000, 2048, 1024),
)
_FITS_EVERY_TILE = Shape(8192, 8192, 1024)


def multiplied(setting: Setting) -> str:
    """The arithmetic of the kernels: that of `SPLIT` is fp16x3."""
    return precision.SPLIT if setting == SPLIT else setting.arithmetic


def products(setting: Setting) -> int:
    """How many products of the tensor cores one product takes."""
    return 3 if setting == SPLIT else 1


@dataclass(frozen=True)
class Tile:
    """A tile by vectors, as the planner describes it.

    Attributes:
        text: ``128x256x64``: rows, columns, and K of a stage.
        plan: arithmetic, family, tile, raster, swizzle, splits.
        shared_bytes: of a CTA.
    """

    text: str
    plan: tuple[int, ...]
    shared_bytes: int

    @property
    def number(self) -> int:
        """Its place in csrc/gemm/sm80_mma/tiles.h."""
        return self.plan[2]

    def waves(self, shape: Shape, ctas_at_once: int) -> float:
        """How often the GPU is filled with so many CTAs."""
        m, n, _ = map(int, self.text.split("x"))
        return -(-shape.m // m) * -(-shape.n // n) / ctas_at_once


@dataclass(frozen=True)
class TileCase(Case):
    """A tile at one size in one arithmetic.

    Attributes:
        tile: which one.
        waves: of its CTAs on the GPU at hand.
    """

    tile: Tile = Tile("", (), 0)
    waves: float = 0.0


def problems() -> dict[str, Problem]:
    """What the kernels compute, by the name of the epilogue that is linked into them."""
    every = custom.problems()
    bare = Problem(CUSTOM, NO_FUNCTOR, "z", {}, lambda z: z)
    return {NO_FUNCTOR: bare, RELU: every["bias_relu"], GELU: every["bias_gelu"]}


def tiles(setting: Setting, gpu: tuple[int, ...] = (), device: int = -1) -> list[Tile]:
    """All tiles by vectors that run on a GPU; `gpu`, `device` as for `epigemm.planning.plans.ask`."""
    shape, arithmetic = _FITS_EVERY_TILE, multiplied(setting)
    dtype = str(setting.dtype).removeprefix("torch.")
    problem = (NO_FUNCTOR, shape.m, shape.n, shape.k or 0, dtype, arithmetic)
    answer = plans.ask(*problem, has_bias=False, any_family=True, gpu=gpu, device=device)
    first = dry_runs.ARITHMETICS.index(arithmetic)
    found = [
        Tile(each["tile"], (first, *each["plan"]), each["shared_bytes"])
        for each in answer["candidates"]
        if each["family"] == FAMILY
    ]
    return sorted(found, key=lambda tile: tile.number)


def case_of(shape: Shape, setting: Setting, tile: Tile, ctas_at_once: int) -> TileCase:
    """One case. Its operands are those of the longest functor."""
    formula = ", ".join(problem.formula for problem in problems().values())
    problem = dataclasses.replace(problems()[GELU], kind=KIND, epilogue=tile.text, formula=formula)
    return TileCase(problem, shape, setting, tile=tile, waves=tile.waves(shape, ctas_at_once))


def why_not(case: TileCase) -> str:
    """Why a case is left out; empty where it is measured."""
    if (case.shape.k or 0) < LEAST_K:
        return f"K is below {LEAST_K}"
    return f"{case.waves:.2f} waves, fewer than {WAVES}" if case.waves < WAVES else ""


def every_case(
    shapes: Sequence[Shape], ctas_at_once: Mapping[tuple[Setting, Tile], int]
) -> tuple[list[TileCase], dict[str, str]]:
    """All cases, and those that are left out, with the reason.

    Args:
        shapes: none: `SHAPES`.
        ctas_at_once: how many CTAs of each tile the GPU runs at once.

    Raises:
        ValueError: a shape without K, or none that is large enough.
    """
    if any(shape.k is None for shape in shapes):
        raise ValueError("--sizes: --mma takes MxNxK")
    found = [
        case_of(shape, setting, tile, count)
        for setting in SETTINGS
        for shape in shapes or SHAPES
        for (of, tile), count in ctas_at_once.items()
        if of == setting
    ]
    left_out = {case.name: why for case in found if (why := why_not(case))}
    if found and len(left_out) == len(found):
        needed = f"K of at least {LEAST_K} and {WAVES} waves of tiles"
        raise ValueError(f"--sizes: --mma takes {needed}, got {', '.join(map(str, shapes or SHAPES))}")
    return [case for case in found if case.name not in left_out], left_out
