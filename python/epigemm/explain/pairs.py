"""Pairs of products that run as one kernel, for `explain`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from epigemm import glu
from epigemm.arguments.calls import LinearCall
from epigemm.calls.considered import consider
from epigemm.epilogues.formulas import BIAS2, GATED
from epigemm.planning.dry_runs import Tried


class Pair(NamedTuple):
    """One kernel for two calls."""

    call: LinearCall  # with the epilogue of the kernel
    tried: Tried


def as_one(second: LinearCall, first: LinearCall) -> Pair | None:
    """The kernel that runs in place of two recorded calls of `linear_glu`; None if both of them run."""
    formula = first.epilogue.name.partition(".")[0]
    bias = first.operands[0] if formula.startswith("bias_") else None
    formula = formula.removeprefix("bias_")
    if first.x.element_size() != 2 or not formula.startswith(GATED) or formula.endswith(BIAS2):
        return None
    call = glu.pair_call(formula, first.x, first.weight, bias, second.bias, first.out)
    taken = _taken(call, second.weight)
    return None if taken is None else Pair(call, taken)


def _taken(call: LinearCall, weight2: Tensor) -> Tried | None:
    considered = consider(call, weight2=weight2)
    return considered.taken if considered.found.fused else None
