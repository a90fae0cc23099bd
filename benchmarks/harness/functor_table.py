"""The planner's table of what primitives cost, csrc/epilogue/costs.def: read, and written from a record."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "csrc" / "epilogue" / "costs.def"
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
// `other` stands for what is not here: long, so that it is not put where it would cost more than it saves.
//
// {source}
// Written by `python -m benchmarks --functors --table RECORD/summary.json`.
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


_LIKE = {
    "pingpong": ("cooperative", 2.0),
    "pingpong_16": ("cooperative_16", 2.0),
    "swap_ab": ("cooperative", 1.0),
    "swap_ab_16": ("cooperative_16", 1.0),
    "slices": ("cooperative", 1.0),
}
"""A column that a record lacks, by one that it has: of a ping-pong tile one warpgroup computes, not both."""


def updated(costs: Costs, summary: Mapping[str, Any]) -> tuple[Costs, str]:
    """The table with a record's figures where they are larger than those that it has, and where they are from.

    A primitive that is repeated alone may take less than among others: with the larger of both figures the sums were
    nearest to what 50 random functors took (docs/internals.md).
    """
    found, like, kept = {}, 0, 0
    for name, of in costs.items():
        measured = summary["primitives"].get(name, {})
        found[name] = {**of}
        for column in of if name != OTHER else ():
            base, factor = _LIKE.get(column, ("", 0.0))
            if column in measured:
                found[name][column] = max(of[column], measured[column])
            elif base in measured:
                found[name][column] = max(of[column], factor * measured[base])
                like += 1
            else:
                kept += 1
    source = (
        f"The larger of what is predicted from instruction counts, and measured on {summary['gpu']}, csrc "
    )
    source += f"{summary['csrc'][:12]}." + (f" From the cooperative tile's: {like} figures." if like else "")
    return found, source + (f" As before: {kept} figures that the record lacks." if kept else "")
