"""Products that a BatchNorm by the batch's own statistics follows, for `explain`."""

from __future__ import annotations

from dataclasses import replace

import torch

from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls.forecast import consider
from epigemm.calls.moments import BLOCK_ROWS, MOST_LEFT
from epigemm.epilogues.registry import Epilogue
from epigemm.explain.answer import Explanation
from epigemm.explain.explanation import LAUNCHES, PRODUCTS, explain_linear


def function_of(call: BatchNormCall) -> str:
    """The name of what is computed."""
    scale = "" if call.norm.scale is None else "_scale"
    return f"linear{scale}_batch_norm{'_relu' if call.norm.relu else ''}"


def explained(call: BatchNormCall) -> Explanation:
    """Of the product, and the BatchNorm behind it."""
    product, behind = call.product, list[str]()
    with_statistics = product._replace(statistics=True)
    if product.x.dtype is not torch.float64 and consider(with_statistics).found.copies_nothing:
        product = with_statistics
    else:
        behind = [_OF_BLOCKS, _OF_COLUMNS] if product.rows > MOST_LEFT * BLOCK_ROWS else [_OF_BLOCKS]
    found = explain_linear(product)
    launches = [*found.kernels, *behind]
    return replace(
        found,
        op=f"{function_of(call)}, by the batch's own statistics",
        reasons=[_BEHIND if _OF_BLOCKS in launches else _WITHIN, *found.reasons],
        kernels=[*launches, *_normalising(call, merges=_OF_COLUMNS not in launches)],
        backward=_BACKWARD,
    )


def behind(found: Explanation, epilogue: Epilogue, call: BatchNormCall, why: str) -> Explanation:
    """The explanation of a product, with a BatchNorm by PyTorch's operators behind it."""
    is_apart = call.norm.scale is not None and epilogue.is_bias
    kernels = [
        *(["torch mul"] if is_apart else []),
        "torch batch_norm",
        *(["torch relu"] if call.norm.relu else []),
    ]
    backward = found.backward
    if not backward.startswith("not needed"):
        backward = f"torch's derivative of {' and '.join(reversed(kernels))}; then {backward}"
    reasons = [f"PyTorch's BatchNorm follows: {why}", *found.reasons]
    return replace(found, reasons=reasons, kernels=[*found.kernels, *kernels], backward=backward)


def _normalising(call: BatchNormCall, *, merges: bool) -> list[str]:
    """What normalises the product. `merges`: the moments of few blocks, in the same kernel."""
    running = call.running
    counts = running.tracked is not None and running.momentum is None
    relu = " and ReLU" if call.norm.relu else ""
    written = "" if running.mean is None else "; the running statistics"
    kernel = f"{_OF_COLUMNS};" if merges else "epigemm CUDA kernel,"
    return [
        *(["torch add_, to the number of batches"] if counts else []),
        f"{kernel} normalisation{relu}{written}",
    ]


_OF_BLOCKS, _OF_COLUMNS = LAUNCHES["blocks"], LAUNCHES["merge"]
_WITHIN = "batch statistics: the product's kernel reduces the blocks of rows that it stores"
_BEHIND = "batch statistics: a kernel behind the product reads it for them"
_BACKWARD = (
    "epigemm's kernels for two sums of each column, for the total of their parts, and for the product's gradient; "
    + PRODUCTS
)
