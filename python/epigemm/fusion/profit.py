"""Whether a fused call pays: the planner's predicted time of its plan against that of the fallback."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epigemm import decisions, gradients, linker, plans, precision
from epigemm.calls import FIND, LinearCall
from epigemm.epilogues import BIAS, MATRIX, PER_COLUMN, PER_ROW, SCALE_BATCH_NORM, Epilogue
from epigemm.fusion.capture import Chain
from epigemm.fusion.operands import Norm
from epigemm.fusion.values import hint, tensor_of

SLOWER = "the planner expects no kernel of epigemm's to be faster there"


def why_not(chain: Chain, *, keeps_pack: bool = False) -> str:
    """Why a chain is not worth a fused call; empty where it is.

    On a CPU there is no planner's device: all that is numerically right is fused.

    Args:
        chain: on a device; its sizes are those of the call that is being compiled.
        keeps_pack: whether the weight keeps its fp16 slices between calls.
    """
    device = chain.product.value.device
    if device.type == "cpu":
        return ""
    place = torch.empty(0, device=device)
    if not plans.has_gpu_kernels(place):
        return "epigemm's kernels do not run on this GPU"
    return why_not_there(call_of(chain), place, keeps_pack=keeps_pack)


def why_not_there(call: LinearCall, place: Tensor, *, keeps_pack: bool = False) -> str:
    """The same of a call of meta tensors, on the device of `place`."""
    code = precision.code(call.precision, place.device.type) if call.x.dtype == torch.float32 else 0
    cost = decisions.NO_COST if keeps_pack else decisions.PER_CALL
    slices = sum(cost << shift for shift in decisions.SHIFTS.values())
    decision = decisions.decide_on_meta(call, code, slices, place)
    if decisions.way(decision) == decisions.FALLBACK:
        return SLOWER
    return linker.would_link(
        call.epilogue, decisions.missing_kernels(call, code, slices, place), place.device
    )


def call_of(chain: Chain) -> LinearCall:
    """The call that a chain becomes, of meta tensors; recorded by autograd its product alone, where that is kept."""
    product = chain.product
    x, weight = tensor_of(product.x), tensor_of(product.weight)
    assert x is not None and weight is not None
    m, k, n = math.prod(map(hint, x.shape[:-1])), hint(x.shape[-1]), hint(product.value.shape[-1])
    dtype = product.value.dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    stored = empty(k, n).t() if product.is_kn else empty(n, k)
    shapes = {PER_COLUMN: (n,), PER_ROW: (m, 1), MATRIX: (m, n)}
    epilogue: Epilogue = BIAS
    bias, operands, scalars = None, [], []
    if chain.epilogue is not None:
        dtypes: list[torch.dtype | None] = []
        for operand in chain.operands:
            value = None if isinstance(operand, Norm) else tensor_of(operand.source)
            dtypes += [torch.float32, torch.float32] if value is None else [value.dtype]
        kinds = chain.formula.kinds
        folded = [kind not in shapes or of is not dtype for kind, of in zip(kinds, dtypes, strict=True)]
        epilogue = chain.epilogue.linked(folded)
        for kind, is_folded in zip(kinds, folded, strict=True):
            if kind in shapes:
                operands.append(empty(*shapes[kind], of=torch.float32 if is_folded else dtype))
            else:
                scalars.append(0.0)
    elif any(isinstance(operand, Norm) for operand in chain.operands):
        epilogue, operands = SCALE_BATCH_NORM, [empty(n, of=torch.float32), empty(n, of=torch.float32)]
    elif product.bias is not None:
        bias = empty(n)
    call = LinearCall(epilogue, empty(m, k), stored, bias, operands, scalars, pack_use=FIND)
    return call.product() if product.value.requires_grad and gradients.keeps_product(call) else call
