"""QuACK's fused products: imported when one is prepared."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from benchmarks.cases import MATRIX, Case, Data
from epigemm.timing import Run

ADD = "add"
"""What a problem says that ``gemm_add`` computes, in place of an activation."""
PACKAGES = (("quack.gemm_interface", "pip install quack-kernels"),)


def bind(case: Case, data: Data, out: Tensor) -> Run:
    """The product, a bias if there is one, then an activation or a matrix."""
    assert data.weight is not None
    library: Any = importlib.import_module("quack.gemm_interface")
    problem, p, x, weight = case.problem, data.parameters, data.x, data.weight.t()
    matrices = [p.vectors[name] for name, operand in problem.operands.items() if operand.kind == MATRIX]

    def act() -> Tensor:
        library.gemm_act(
            x,
            weight,
            postact_out=out,
            bias=p.bias,
            activation=problem.quack,
            store_preact=False,
            tuned=True,
        )
        return out

    def add() -> Tensor:
        library.gemm_add(x, weight, matrices[0], out=out, bias=p.bias, tuned=True)
        return out

    return add if problem.quack == ADD else act
