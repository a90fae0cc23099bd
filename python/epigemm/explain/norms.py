"""Products that a BatchNorm by the batch's own statistics follows, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls.forecast import consider
from epigemm.calls.moments import BLOCK_ROWS, MOST_LEFT
from epigemm.epilogues.registry import Epilogue
from epigemm.explain.answer import Explanation
from epigemm.explain.explanation import PRODUCTS, explain_linear


def function_of(call: BatchNormCall) -> str:
    """The name of what is computed."""
    scale = "" if call.vectors.scale is None else "_scale"
    return f"linear{scale}_batch_norm{'_relu' if call.relu else ''}"


def explained(call: BatchNormCall) -> Explanation:
    """Of the product, and the BatchNorm behind it."""
    product = call.product
    with_statistics, launches = product._replace(statistics=True), list[str]()
    if product.x.dtype is not torch.float64 and (dry := consider(with_statistics).found).copies_nothing:
        launches = dry.launches
    found = explain_linear(with_statistics if launches else product)
    in_gemm = bool(launches) and "blocks" not in launches
    merges = "merge" in launches if launches else product.rows > MOST_LEFT * BLOCK_ROWS
    return replace(
        found,
        op=f"{function_of(call)}, by the batch's own statistics",
        reasons=[_WITHIN if in_gemm else _BEHIND, *found.reasons],
        kernels=[*found.kernels, *_launches(call, in_gemm, merges)],
        backward=_BACKWARD,
    )


class ByTorch(NamedTuple):
    """A BatchNorm that PyTorch's operators compute."""

    call: BatchNormCall
    why: str

    def behind(self, found: Explanation, epilogue: Epilogue) -> Explanation:
        """The explanation of a product, with this BatchNorm behind it."""
        is_apart = self.call.vectors.scale is not None and epilogue.is_bias
        kernels = [*(["torch mul"] if is_apart else []), "torch batch_norm"]
        kernels += ["torch relu"] if self.call.relu else []
        backward = found.backward
        if not backward.startswith("not needed"):
            backward = f"torch's derivative of {' and '.join(reversed(kernels))}; then {backward}"
        reasons = [f"PyTorch's BatchNorm follows: {self.why}", *found.reasons]
        return replace(found, reasons=reasons, kernels=[*found.kernels, *kernels], backward=backward)


def _launches(call: BatchNormCall, in_gemm: bool, merges: bool) -> Iterator[str]:
    """What follows the product. `merges`: the blocks are so many that a kernel of its own merges them."""
    if not in_gemm:
        yield _OF_BLOCKS
    if merges:
        yield _OF_COLUMNS
    running = call.running
    if running.tracked is not None and running.momentum is None:
        yield "torch add_, to the number of batches"
    relu = "" if not call.relu else " and ReLU"
    written = "" if running.mean is None else "; the running statistics"
    yield f"{_KERNEL if merges else f'{_OF_COLUMNS};'} normalisation{relu}{written}"


_KERNEL = "epigemm CUDA kernel,"
_OF_BLOCKS = "epigemm CUDA kernel, mean and variance of blocks of rows"
_OF_COLUMNS = "epigemm CUDA kernel, mean and variance of the columns, from those of the blocks"
_WITHIN = "batch statistics: the product's kernel reduces the blocks of rows that it stores"
_BEHIND = "batch statistics: a kernel behind the product reads it for them"
_BACKWARD = (
    "epigemm's kernels for two sums of each column, for the total of their parts, and for the product's gradient; "
    + PRODUCTS
)
