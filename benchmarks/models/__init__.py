"""Whole models, as they are and fused: ``python -m benchmarks --models``.

================  ====================================================================================
``problems``      the models of the public problem set, plain PyTorch
``networks``      an MLP, residual blocks, DLRM, a vision transformer, plain PyTorch
``workloads``     how each is built and what goes in; sizes, batches
``alternatives``  eager, fused, compiled, captured: what is compared
``runner``        what is timed and checked, and how; the order
``records``       plain data classes: what was measured
``tables``        JSON -> tables (console, Markdown) and PNG
``command``       what ``--models`` does
================  ====================================================================================
"""

from benchmarks.models.command import (
    KIND,
    TIME_BUDGET_S,
    ModelOptions,
    Plan,
    measure,
    plan,
    show_selection,
)
from benchmarks.models.tables import write

__all__ = ["KIND", "TIME_BUDGET_S", "ModelOptions", "Plan", "measure", "plan", "show_selection", "write"]
