"""What the range check costs: a call on fp16 slices where nothing, one row, or all of x is computed again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import epigemm
from benchmarks.gradings.data import Draw
from epigemm.tuning.timing import Effort, make_timer

SHAPES = ((16, 8192, 8192), (1024, 8192, 8192), (4096, 4096, 4096))
HOST_US = 200.0  # more than a call takes before it is launched


def _beyond_slices(row: Tensor) -> None:
    """A row that two slices cannot hold: nearly everything lies 2^40 below one element."""
    row.mul_(2.0**-40)[..., 0] = 1.0


def _with_nan(x: Tensor) -> None:
    x[x.shape[0] // 2, 5] = math.nan


SPOILT: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda x: None,
    "one row out of range": lambda x: _beyond_slices(x[0]),
    "one NaN": _with_nan,
    "all rows out of range": _beyond_slices,
}


def measure(
    device: torch.device, shapes: Sequence[tuple[int, int, int]] = SHAPES, effort: Effort | None = None
) -> list[dict[str, Any]]:
    """Milliseconds of `linear_relu` for each kind of x, and with fp32 products: medians of turns, L2 flushed.

    Args:
        device: where to run.
        shapes: M, N, K.
        effort: how often.
    """
    with torch.no_grad():
        return [{"shape": shape, "ms": _milliseconds(*shape, device, effort or Effort())} for shape in shapes]


def _milliseconds(m: int, n: int, k: int, device: torch.device, effort: Effort) -> dict[str, float]:
    draw = Draw.seeded(0, device)
    weight, bias = draw.uniform(n, k, -1.0, 1.0), draw.uniform(1, n, -1.0, 1.0)[0]
    inputs = [draw.uniform(m, k, 0.5, 2.0) for _ in SPOILT]
    for x, spoil in zip(inputs, SPOILT.values(), strict=True):
        spoil(x)
    packed = epigemm.pack(weight, precision="highest")
    runs = [partial(epigemm.linear_relu, x, packed, bias, precision="highest") for x in inputs]
    runs.append(partial(epigemm.linear_relu, inputs[0], weight, bias, precision="ieee"))
    samples = make_timer(device).in_turn(runs, effort, HOST_US)
    return {name: statistics.median(ms) for name, ms in zip((*SPOILT, "sgemm"), samples, strict=True)}
