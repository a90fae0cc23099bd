"""The sweep over a grid of sizes: small batches to large ones, every layer shape, the best peer named at each point.

``python -m benchmarks --grid`` measures one problem after another at every M of a doubling range and every
(N, K) of a list. It is a sweep over powers of two, at which choices used to be tuned: not a test of the choice,
which is `benchmarks.drawn`. A point costs little: its inputs are views of memory drawn once, rows and columns
of each result are checked instead of all of it, and peers that take long to prepare are measured at some points only.

============  ===========================================================================================
``points``    which sizes, and at which of them the slow peers run
``sampling``  the check of some rows and columns against float64
``runner``    points x peers -> records
``tables``    JSON -> ratios to the best peer, the summary, Markdown
``figures``   JSON -> one panel per (N, K)
``plans``     the same grid, every plan of the fused kernels: what a cost model is fitted to
``command``   what ``--grid`` does
============  ===========================================================================================
"""

from benchmarks.grid.command import measure, measure_plans, show, show_plans, write
from benchmarks.grid.plans import EFFORT as PLAN_EFFORT
from benchmarks.grid.plans import PlanGrid
from benchmarks.grid.points import EVERYWHERE, LAYERS, ROWS, SOMEWHERE, select, sizes
from benchmarks.grid.runner import EFFORT, GridRunner

PEERS = (*EVERYWHERE, *SOMEWHERE)

__all__ = [
    "EFFORT",
    "EVERYWHERE",
    "LAYERS",
    "PEERS",
    "PLAN_EFFORT",
    "ROWS",
    "GridRunner",
    "PlanGrid",
    "measure",
    "measure_plans",
    "select",
    "show",
    "show_plans",
    "sizes",
    "write",
]
