"""What the planner chooses on GPUs that are described, none of which has run the mma.sync kernels.

    python -m tools.mma_choices

All times are predictions from assumed figures; nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from epigemm.planner.gpus import KNOWN
from tools.planner import ask_planner

GPUS = {name: KNOWN[name].numbers for name in ("A100 40 GB", "A100 80 GB", "A10", "L40S", "RTX 4090", "B200")}
"""As `ask_planner` takes them."""

_ROWS = (1, 8, 16, 48, 128, 300, 512, 1024, 2048, 8192)
_WEIGHTS = (  # N, K
    *((64, 64), (256, 1024), (512, 512), (768, 768), (768, 3072), (1024, 64), (1024, 1024), (2048, 2048)),
    *((3072, 768), (4096, 4096), (4096, 11008), (5120, 13824), (8192, 8192), (8192, 28672), (11008, 4096)),
    *((28672, 8192), (32768, 4096), (1001, 513), (4096, 147), (50257, 768)),
)
SHAPES = [(m, n, k) for (n, k), m in product(_WEIGHTS, _ROWS)]
"""M, N, K."""

EPILOGUE = "bias_gelu"
MULTIPLIED = {"bf16": ("bfloat16", "ieee"), "fp32 in three products of fp16, packed": ("float32", "split")}
"""Dtype and arithmetic, with a name for the table."""
BF16, FP32 = MULTIPLIED.values()


@dataclass(frozen=True)
class Choice:
    """One answer of the planner's; times in microseconds.

    `tile`: of the best fused plan, where it is chosen, with the number of CTAs that share its K: ``64x64x64/4``.
    """

    gpu: str
    shape: tuple[int, int, int]
    tile: str
    fused_us: float  # infinite: there is no fused plan
    fallback_us: float

    FALLBACK: ClassVar[str] = "fallback"

    @property
    def gain(self) -> float:
        """The fallback's time over the best fused plan's."""
        return self.fallback_us / self.fused_us


def choices(multiplied: tuple[str, str] = BF16) -> Iterator[Choice]:
    """For every GPU and shape."""
    for (name, gpu), shape in product(GPUS.items(), SHAPES):
        found = ask_planner(EPILOGUE, *shape, *multiplied, packed=multiplied == FP32, gpu=gpu)
        best_us = min((each["predicted_us"] for each in found["candidates"]), default=math.inf)
        tile = _tile_text(found) if found["fused"] else Choice.FALLBACK
        yield Choice(name, shape, tile, best_us, found["fallback_us"])


def _tile_text(plan: dict[str, Any]) -> str:
    splits = plan["splits"]
    return f"{plan['tile']}/{splits}" if splits > 1 else str(plan["tile"])


def table() -> str:
    """The choices as text."""
    head = [
        f"{EPILOGUE}: the tile that the planner chooses, and the fallback's predicted time over the best fused",
        "plan's (0.00: none is accurate enough). 64x64x64/4: four CTAs share the K of a tile. From assumed figures:",
        "nothing was measured, and they have not been run there. Written by python -m tools.mma_choices",
    ]
    return "\n".join([*head, *(line for name in MULTIPLIED for line in _lines(name))]) + "\n"


def _lines(name: str) -> list[str]:
    """A line a shape, a column a GPU, with the expected gain in it."""
    lines = [
        "",
        f"{name}:",
        f"{'M':>6}{'N':>7}{'K':>7}" + "".join(f"  {name:<19}" for name in GPUS).rstrip(),
    ]
    cells = {
        (each.shape, each.gpu): f"  {each.tile.replace('fallback', '-'):<13}{each.gain:4.2f}  "
        for each in choices(MULTIPLIED[name])
    }
    for shape in SHAPES:
        m, n, k = shape
        lines.append(f"{m:>6}{n:>7}{k:>7}" + "".join(cells[shape, name] for name in GPUS).rstrip())
    return lines


if __name__ == "__main__":
    print(table(), end="")
