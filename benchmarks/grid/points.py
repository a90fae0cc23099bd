"""Which sizes the grid has, and at which of them slow peers are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.cases import Case, Setting, Shape, select_cases
from benchmarks.records import EAGER, MAX_AUTOTUNE

ROWS = tuple(2**exponent for exponent in range(17))
"""M: 1 to 65536."""

LAYERS = (
    (8192, 8192),
    (4096, 4096),
    (4096, 1024),
    (1024, 4096),
    (11008, 4096),
    (4096, 11008),
    (512, 8192),
)
"""(N, K): squares, both ways through a small and a large feed-forward layer, and few columns."""

EVERYWHERE = (EAGER, "mm", "addmm_activation")
SOMEWHERE = ("nvmath", "compile", "quack", MAX_AUTOTUNE)
"""Peers that tune or compile for seconds, the quickest first: a run out of time has then lost the least."""

SOME_POINTS = 12


def sizes(rows: Sequence[int], layers: Sequence[tuple[int, int]]) -> list[Shape]:
    """All points, the layers one after another, M rising."""
    return [Shape(m, n, k) for n, k in layers for m in rows]


def some(shapes: Sequence[Shape], count: int = SOME_POINTS) -> list[Shape]:
    """About ``count`` points over the whole range of M that take the layers in turn."""
    rows = sorted({shape.m for shape in shapes})
    layers = list(dict.fromkeys((shape.n, shape.k) for shape in shapes))
    wanted = min(count, len(shapes))
    # A stride that shares no factor with their number visits all layers, neighbours in M far apart.
    stride = next(step for step in (3, 4, 5, 1) if math.gcd(step, len(layers)) == 1)
    chosen = []
    for index in range(wanted):
        m = rows[round(index * (len(rows) - 1) / max(wanted - 1, 1))]
        n, k = layers[index * stride % len(layers)]
        chosen.append(Shape(m, n, k))
    present = set(shapes)
    return [shape for shape in dict.fromkeys(chosen) if shape in present]


def select(patterns: Sequence[str], shapes: Sequence[Shape], settings: Sequence[Setting]) -> list[Case]:
    """The grid's cases: one arithmetic and problem after another, each in the order of ``shapes``.

    Raises:
        ValueError: a pattern matches no problem, or none with a product in evaluation mode.
    """
    found = [
        case
        for setting in settings
        for case in select_cases(
            patterns=patterns or ["linear/bias_relu"], sizes=shapes, sweep_m=[], settings=[setting], real=True
        )
        if case.shape.k and not case.problem.training
    ]
    if not found:
        raise ValueError("--grid: no linear problem in evaluation mode is left")
    return found


def needed_bytes(case: Case) -> int:
    """Device memory while a point is measured, at most: operands, their pieces, results and eager's steps."""
    m, n, k = case.shape.m, case.shape.n, case.shape.k or 0
    return (2 * m * k + 2 * n * k + 6 * m * n) * case.setting.dtype.itemsize
