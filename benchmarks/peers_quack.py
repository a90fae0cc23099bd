"""QuACK's fused products: imported when one is prepared."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from benchmarks.cases import Data
from epigemm.timing import Run

NAME = "quack"
ADD = "add"
"""What a case says that `add` computes, in place of an activation."""
PACKAGES = (("quack.gemm_interface", "pip install quack-kernels"),)


def _operands(data: Data) -> tuple[Any, Tensor, Tensor | None]:
    assert data.weight is not None
    bias = data.parameters.vectors.get("bias", data.parameters.linear_bias)
    return importlib.import_module("quack.gemm_interface"), data.weight.t(), bias


def act(data: Data, out: Tensor, activation: str) -> Run:
    """The product, a bias if there is one, an activation."""
    quack, weight, bias = _operands(data)
    options = {"bias": bias, "activation": activation, "store_preact": False, "tuned": True}

    def run() -> Tensor:
        quack.gemm_act(data.x, weight, postact_out=out, **options)
        return out

    return run


def add(data: Data, out: Tensor, matrix: Tensor) -> Run:
    """The product, a bias if there is one, a matrix."""
    quack, weight, bias = _operands(data)

    def run() -> Tensor:
        quack.gemm_add(data.x, weight, matrix, out=out, bias=bias, tuned=True)
        return out

    return run
