"""The planner's table of what primitives cost, csrc/epilogue/costs.def: read, and written from a record."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "csrc" / "epilogue" / "costs.def"
COLUMNS = (
    "elementwise",
    "elementwise_16",
    "cooperative",
    "cooperative_16",
    "pingpong",
    "pingpong_16",
    "swap_ab",
    "swap_ab_16",
    "slices",
)
"""Who calls a functor (csrc/epilogue/cost.h), and whether the result has 16 bits: in the order of the table."""
OTHER = "other"
Costs = dict[str, dict[str, float]]
"""By primitive and column, in cycles of a multiprocessor an element."""

_HEAD = """\
// What a multiprocessor takes for one element of a primitive, in cycles at its highest clock, beyond the kernel with a
// product with a number as its functor: EPIGEMM_COST(name, elementwise, elementwise_16, cooperative, cooperative_16,
// pingpong, pingpong_16, swap_ab, swap_ab_16, slices), see cost.h. `_16`: with the functions of results of 16 bits.
// digamma, erfinv, i0 and lgamma have none of these: their figures of fp32 stand for both.
// `other` stands for what is not here: long, so that it is not put where it would cost more than it saves.
//
// {source}
// Written by `python -m tools.fit_costs --table RECORD/summary.json`.
"""
PREDICTED = "Predicted from instruction counts, not measured yet."


def read(path: Path = PATH) -> Costs:
    """The table as it is."""
    rows = re.findall(r"^EPIGEMM_COST\((\w+), ([^)]*)\)$", path.read_text(), re.MULTILINE)
    return {name: dict(zip(COLUMNS, map(float, values.split(", ")), strict=True)) for name, values in rows}


def text(costs: Mapping[str, Mapping[str, float]], source: str) -> str:
    """The file of a table."""
    lines = [
        f"EPIGEMM_COST({name}, {', '.join(f'{of[column]:.4g}' for column in COLUMNS)})"
        for name, of in sorted(costs.items(), key=lambda pair: (pair[0] != OTHER, pair[0]))
    ]
    return _HEAD.format(source="\n// ".join(textwrap.wrap(source, 115))) + "\n".join(lines) + "\n"


_LEAST = 0.8
"""Of the elementwise kernel's figure, what a kernel with a product has at least: a part of what it takes is hidden at K
= 256, and is not behind more functions. With .8 the sums were nearest to what 50 random functors took."""
_HALF = {"pingpong": 2.0, "pingpong_16": 2.0}
"""Of a ping-pong tile one warpgroup computes, not both."""


def fused(costs: Mapping[str, float], column: str) -> float:
    """What the planner counts for a primitive in a column, of measured figures."""
    if column.startswith("elementwise"):
        return costs[column]
    beside = "elementwise_16" if column.endswith("_16") else "elementwise"
    return max(costs[column], _LEAST * _HALF.get(column, 1.0) * costs.get(beside, 0.0))


def updated(costs: Costs, summary: Mapping[str, Any]) -> tuple[Costs, str]:
    """The table with a record's figures, and where they are from."""
    found, kept = {}, 0
    for name, of in costs.items():
        measured = summary["primitives"].get(name, {}) if name != OTHER else {}
        found[name] = {column: fused(measured, column) if column in measured else of[column] for column in of}
        kept += 0 if name == OTHER else sum(column not in measured for column in of)
    source = f"Measured on {summary['gpu']}, csrc {summary['csrc'][:12]}; in kernels with a product at least"
    source += f" {_LEAST} of the elementwise kernel's."
    return found, source + (f" As before: {kept} figures that the record lacks." if kept else "")
