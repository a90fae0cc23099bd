"""Products that a BatchNorm by the batch's own statistics follows, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from epigemm import batch_statistics
from epigemm.arguments.calls import LinearCall
from epigemm.batch_statistics import Asked, noted
from epigemm.calls import weight_slices
from epigemm.calls.moments import BLOCK_ROWS, MOST_LEFT
from epigemm.epilogues.library import BIAS
from epigemm.explain.derivatives import PRODUCTS
from epigemm.explain.explained import Explanation
from epigemm.explain.explanation import explain_linear
from epigemm.explain.recorder import Recorded
from epigemm.explain.words import OF_BLOCKS, OF_COLUMNS, WITHIN
from epigemm.packs import weight_packs
from epigemm.planning import dry_runs


@contextmanager
def noting() -> Iterator[list[Asked]]:
    """Note what is asked for. PyTorch's operators compute it meanwhile: behind each follows the call of the product."""
    before, noted.calls = noted.calls, []
    try:
        yield noted.calls
    finally:
        noted.calls = before


def function_of(asked: Asked) -> str:
    """The name of what is computed."""
    scale = "" if asked.vectors.scale is None else "_scale"
    return f"linear{scale}_batch_norm{'_relu' if asked.call.relu else ''}"


def explained(
    found: Explanation, recorded: Recorded, differentiates: bool, wants_gradients: bool
) -> Explanation:
    """Of the product and the BatchNorm; `found`: what a plain call of the product would be."""
    asked, (_, call) = recorded.norm, recorded.taken_apart()
    assert asked is not None and isinstance(call, LinearCall)
    bias = recorded.folded_bias if call.bias is None else call.bias
    if why := batch_statistics.why_not(asked, call.x, call.weight, bias):
        return _with_torchs(found, asked, call, f"PyTorch's BatchNorm follows: {why}")
    product = call._replace(epilogue=BIAS, operands=(bias,))
    launches = _launched(product, wants_gradients)
    of_product = explain_linear(product._replace(statistics=bool(launches)), wants_gradients)
    in_gemm = bool(launches) and "blocks" not in launches
    rows = product.x.numel() // product.x.shape[-1]
    merges = "merge" in launches if in_gemm else rows > MOST_LEFT * BLOCK_ROWS
    return replace(
        of_product,
        op=f"{found.op.partition(':')[0]}: {function_of(asked)}, by the batch's own statistics",
        reasons=[_WITHIN if in_gemm else _BEHIND, *of_product.reasons],
        kernels=[*recorded.casts, *of_product.kernels, *_launches(asked, in_gemm, merges)],
        backward=_BACKWARD
        if differentiates
        else f"not needed: no argument requires grad (otherwise: {_BACKWARD})",
    )


def _launched(product: LinearCall, wants_gradients: bool) -> list[str]:
    """What a call launches that gives the product and its statistics; nothing if these are two calls."""
    if product.x.dtype is torch.float64:
        return []
    if wants_gradients and product.weight.requires_grad:
        product = product._replace(pack_use=weight_packs.NONE)
    dry = dry_runs.dry_run(product._replace(statistics=True), weight_slices.number_for(product))
    return dry.launches if dry.copies_nothing else []


def _launches(asked: Asked, in_gemm: bool, merges: bool) -> Iterator[str]:
    """What follows the product. `merges`: the blocks are so many that a kernel of its own merges them."""
    if not in_gemm:
        yield OF_BLOCKS
    if merges:
        yield OF_COLUMNS
    running = asked.call.running
    if running.tracked is not None and running.momentum is None:
        yield "torch add_, to the number of batches"
    relu = "" if not asked.call.relu else " and ReLU"
    written = "" if running.mean is None else "; the running statistics"
    yield f"{_KERNEL if merges else f'{OF_COLUMNS};'} normalisation{relu}{written}"


def _with_torchs(found: Explanation, asked: Asked, call: LinearCall, reason: str) -> Explanation:
    is_apart = asked.vectors.scale is not None and call.epilogue is BIAS
    behind = [*(["torch mul"] if is_apart else []), "torch batch_norm"]
    behind += ["torch relu"] if asked.call.relu else []
    backward = f"torch's derivative of {' and '.join(reversed(behind))}; then {found.backward}"
    if found.backward.startswith("not needed"):
        backward = found.backward
    return replace(
        found, reasons=[reason, *found.reasons], kernels=[*found.kernels, *behind], backward=backward
    )


_KERNEL = "epigemm CUDA kernel,"
_WITHIN = f"batch statistics: {WITHIN}"
_BEHIND = "batch statistics: a kernel behind the product reads it for them"
_BACKWARD = (
    "epigemm's kernels for two sums of each column, for the total of their parts, and for the product's gradient; "
    + PRODUCTS
)
