"""Products that a BatchNorm by the batch's own statistics follows, for `explain`."""

from __future__ import annotations

from dataclasses import replace

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
        kernels=[*found.kernels, *_behind_product(call, in_gemm, merges)],
        backward=_BACKWARD,
    )


def behind(found: Explanation, epilogue: Epilogue, call: BatchNormCall, why: str) -> Explanation:
    """The explanation of a product, with a BatchNorm by PyTorch's operators behind it."""
    is_apart = call.vectors.scale is not None and epilogue.is_bias
    kernels = [
        *(["torch mul"] if is_apart else []),
        "torch batch_norm",
        *(["torch relu"] if call.relu else []),
    ]
    backward = found.backward
    if not backward.startswith("not needed"):
        backward = f"torch's derivative of {' and '.join(reversed(kernels))}; then {backward}"
    reasons = [f"PyTorch's BatchNorm follows: {why}", *found.reasons]
    return replace(found, reasons=reasons, kernels=[*found.kernels, *kernels], backward=backward)


def _behind_product(call: BatchNormCall, in_gemm: bool, merges: bool) -> list[str]:
    """What follows the product. `merges`: the blocks are so many that a kernel of its own merges them."""
    running = call.running
    counts = running.tracked is not None and running.momentum is None
    relu = " and ReLU" if call.relu else ""
    written = "" if running.mean is None else "; the running statistics"
    return [
        *([] if in_gemm else [_OF_BLOCKS]),
        *([_OF_COLUMNS] if merges else []),
        *(["torch add_, to the number of batches"] if counts else []),
        f"{_KERNEL if merges else f'{_OF_COLUMNS};'} normalisation{relu}{written}",
    ]


_KERNEL = "epigemm CUDA kernel,"
_OF_BLOCKS = "epigemm CUDA kernel, mean and variance of blocks of rows"
_OF_COLUMNS = "epigemm CUDA kernel, mean and variance of the columns, from those of the blocks"
_WITHIN = "batch statistics: the product's kernel reduces the blocks of rows that it stores"
_BEHIND = "batch statistics: a kernel behind the product reads it for them"
_BACKWARD = (
    "epigemm's kernels for two sums of each column, for the total of their parts, and for the product's gradient; "
    + PRODUCTS
)
