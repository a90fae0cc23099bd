"""Whether a fused call pays the device: the planner's predicted time of its plan against that of the fallback."""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from epigemm.arguments.calls import FIND, LinearCall
from epigemm.autograd import gradients
from epigemm.calls import elementwise_kernels
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.registry import BIAS, SCALE_BATCH_NORM, Epilogue
from epigemm.epilogues.traced import LinkedEpilogue
from epigemm.fusion import costs
from epigemm.fusion.chains import Chain
from epigemm.fusion.operands import ChainOperand, Norm
from epigemm.fusion.values import hint, tensor_of
from epigemm.linking import loading
from epigemm.planning import dry_runs, plans
from epigemm.planning.dry_runs import DryRun

SLOWER = "the planner expects no kernel of epigemm's to be faster there"
RECORDED = "in 16 bits training gains nothing"
# Fewer kernels than so many behind a product are none that one would replace; and what one may take of their time.
_FEWEST, _WORTH = 2, 0.9


class Way(enum.Enum):
    """How a call runs: one kernel on the tensors as they lie, those on fp16 slices, or the fallback.

    Of a chain with several operators behind its product the fallback is a way of its own: PyTorch's GEMM, and one
    elementwise kernel in the place of several.
    """

    TENSORS = enum.auto()
    SLICES = enum.auto()
    FALLBACK = enum.auto()
    TWO_KERNELS = enum.auto()


class Judged(NamedTuple):
    """What is expected of a chain as a fused call.

    Attributes:
        why_not: why it is not worth one; empty where it is.
        way: how it would run.
        fallback_us: what the device takes for the fallback; 0 where that is not asked.
        fused_us: what it takes for the fused call.
    """

    why_not: str
    way: Way = Way.TENSORS
    fallback_us: float = 0.0
    fused_us: float = 0.0


def judged(chain: Chain, *, keeps_pack: bool = False, is_eager: bool = True) -> Judged:
    """Whether a chain is worth a fused call on its device, at the sizes of the call that is being compiled.

    On a CPU there is no planner's device: all that is numerically right is fused. `is_eager`: what is not fused runs
    operator by operator, and no other compiler makes one kernel of several.
    """
    device = chain.product.value.device
    if device.type == "cpu":
        return Judged("")
    place = torch.empty(0, device=device)
    if not plans.has_gpu_kernels(place):
        return Judged("epigemm's kernels do not run on this GPU")
    recorded = chain.product.value.requires_grad
    found = judged_there(call_of(chain), place, keeps_pack=keeps_pack, is_recorded=recorded)
    if is_eager and found.why_not in (SLOWER, RECORDED):
        return in_two_kernels(chain, found, place)
    return found


def in_two_kernels(chain: Chain, found: Judged, place: Tensor) -> Judged:
    """Whether a chain that no fused kernel serves is worth PyTorch's GEMM and one elementwise kernel behind it.

    It is where that replaces two or more kernels, and moves fewer bytes. Recorded by autograd the product is kept, and
    what follows it is one kernel in the backward pass, too; there a vector's gradient would be a matrix first.
    """
    behind = costs.kernels_behind(chain)
    if chain.epilogue is None or chain.norm is not None or len(behind) < _FEWEST:
        return found
    if costs.one_kernel_us(chain) > _WORTH * sum(map(costs.device_us, behind)):
        return found
    recorded = chain.product.value.requires_grad
    if recorded and any(_learns(each, chain) for each in chain.operands):
        return found
    call = call_of(chain, is_product_alone=False)
    dtype = call.x.dtype
    for derivative in (False, True) if recorded else (False,):
        kernel = elementwise_kernels.missing(
            call.epilogue, torch.empty(0, dtype=dtype, device=place.device), derivative=derivative
        )
        if isinstance(call.epilogue, LinkedEpilogue) and loading.would_link(
            call.epilogue, kernel, place.device
        ):
            return found
    return found._replace(why_not="", way=Way.TWO_KERNELS, fused_us=found.fallback_us)


def plain_us(judged: Judged, behind: list[fx.Node]) -> float:
    """Of a chain without fusion, operator by operator: the fallback has one of them, or a ReLU in the product."""
    more = sorted(map(costs.device_us, behind))
    return judged.fallback_us + sum(more if judged.way == Way.FALLBACK else more[:-1])


def notes(chain: Chain, found: Judged) -> tuple[str, ...]:
    """What a report says of how a chain runs; nothing of one kernel."""
    if found.way is not Way.TWO_KERNELS:
        return ()
    behind = len(costs.kernels_behind(chain))
    return (f"runs as PyTorch's GEMM and one elementwise kernel in the place of {behind}",)


def _learns(operand: ChainOperand | Norm, chain: Chain) -> bool:
    """Whether an operand, other than the product's bias and matrices, has a gradient."""
    if not isinstance(operand, ChainOperand) or operand.kind == MATRIX:
        return False
    (source,) = operand.sources
    value = tensor_of(source)
    return source is not chain.product.bias and value is not None and value.requires_grad


def judged_there(
    call: LinearCall, place: Tensor, *, keeps_pack: bool = False, is_recorded: bool = False
) -> Judged:
    """The same of a call of meta tensors, on the device of `place`; `is_recorded`: by autograd."""
    slices = dry_runs.ALL_KEPT if keeps_pack else 0
    found = dry_runs.dry_run(call, slices, place, tried=call.x.dtype != torch.float32)
    way = Way.SLICES if found.on_slices else Way.TENSORS if found.fused else Way.FALLBACK
    if is_recorded and call.x.dtype != torch.float32:
        why_not = RECORDED
    elif way is Way.FALLBACK and found.gemm != dry_runs.WITH_BIAS_AND_RELU:
        why_not = SLOWER
    else:
        why_not = loading.would_link(call.epilogue, ",".join(found.missing), place.device)
    fallback_us, fused_us = _expected_us(call, found, place, keeps_pack)
    return Judged(why_not, way, fallback_us, fused_us)


def _expected_us(call: LinearCall, found: DryRun, place: Tensor, keeps_pack: bool) -> tuple[float, float]:
    """What the device is expected to need in the fallback at the precision in force, and for the decision."""
    asked = _of_fp32(call, found, place, keeps_pack) if call.x.dtype == torch.float32 else found.tried[0].plan
    fallback_us = plans.fallback_us(asked)
    return fallback_us, min(fallback_us, plans.fused_us(asked))


def _of_fp32(call: LinearCall, found: DryRun, place: Tensor, keeps_pack: bool) -> dict[str, Any]:
    """The planner's answer for the arithmetic that is decided on."""
    device = place.get_device()
    (m, k), n = call.x.shape, call.weight.shape[0]
    return plans.ask(
        call.epilogue.name,
        m,
        n,
        k,
        "float32",
        found.arithmetic,
        packed=keeps_pack,
        tf32_allowed=dry_runs.order_on(call, place).tf32_allowed,
        has_bias=call.bias is not None,
        gpu=plans.gpu_numbers(device),
        device=device,
    )


def call_of(chain: Chain, *, is_product_alone: bool | None = None) -> LinearCall:
    """The call that a chain becomes, of meta tensors; or its product alone.

    None: recorded by autograd the product alone, where that is kept.
    """
    product = chain.product
    x, weight = tensor_of(product.x), tensor_of(product.weight)
    assert x is not None and weight is not None
    m, k, n = math.prod(map(hint, x.shape[:-1])), hint(x.shape[-1]), hint(product.value.shape[-1])
    dtype = product.value.dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    stored = empty(k, n).t() if product.is_kn else empty(n, k)
    epilogue: Epilogue = BIAS
    bias, operands, scalars = None, [], []
    if chain.epilogue is not None:
        given: list[Tensor | float] = []
        dtypes: list[torch.dtype] = []
        for operand in chain.operands:
            value = None if isinstance(operand, Norm) else tensor_of(operand.sources[0])
            dtypes += [torch.float32, torch.float32] if value is None else [value.dtype]
        for kind, of in zip(chain.formula.kinds, dtypes, strict=True):
            given.append(0.0 if kind == SCALAR else empty(*KINDS[kind].shape((m,), n), of=of))
        epilogue = chain.epilogue.of_linear(empty(m, k), given)
        operands = [each for each in given if isinstance(each, Tensor)]
        if epilogue is chain.epilogue.copied:
            bias, operands = operands[0], []
        scalars = [0.0] * chain.formula.kinds.count(SCALAR)
    elif chain.norm is not None:
        epilogue, operands = SCALE_BATCH_NORM, [empty(n, of=torch.float32), empty(n, of=torch.float32)]
    elif product.bias is not None:
        bias = empty(n)
    call = LinearCall(epilogue, empty(m, k), stored, bias, operands, scalars, pack_use=FIND)
    if is_product_alone is None:
        is_product_alone = product.value.requires_grad and gradients.keeps_product(call)
    return call.product() if is_product_alone else call
