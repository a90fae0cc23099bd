"""Whether a fused call saves device time: the planner's predicted time of its plan, compared with the fallback's."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from epigemm.arguments import forms
from epigemm.arguments.calls import EightBits, LinearCall, operand_dtype
from epigemm.arguments.eight_bits import blocks
from epigemm.autograd import gradients
from epigemm.calls import elementwise_kernels
from epigemm.calls.elementwise_kernels import Kind
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.library import BIAS, SCALE_BATCH_NORM
from epigemm.epilogues.registry import Epilogue
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of
from epigemm.fusion.operands import ChainOperand
from epigemm.fusion.values import hint, known, tensor_of, value_at
from epigemm.linker import loader
from epigemm.planner import dry_runs, plans

SLOWER = "the planner expects no kernel of epigemm's to be faster there"
RECORDED = "in 16 bits training gains nothing"
# The least number of kernels behind a product that one kernel replaces, and the share of their time that it may take.
_FEWEST, _WORTH = 2, 0.9
# The least time of a kernel, and the bytes that it moves in a microsecond on an H200, also as a share of a GPU's
# nominal bandwidth.
_LEAST_US, _BYTES_PER_US, _OF_NOMINAL = 3.0, 3e6, 0.61


class Way(enum.Enum):
    """How a call runs: a fused kernel or the fallback.

    For a chain with several operators behind its product the fallback counts separately: PyTorch's GEMM, and one
    elementwise kernel in place of several.
    """

    FUSED = enum.auto()
    FALLBACK = enum.auto()
    TWO_KERNELS = enum.auto()


class Judged(NamedTuple):
    """The estimate for a chain as a fused call.

    Attributes:
        why_not: why it should not become a fused call; empty if it should.
        way: how the call would run.
        fallback_us: the device's time for the fallback; 0 if it was not estimated.
        fused_us: the device's time for the fused call.
        both: the `gates.Joined` of two chains that run as one kernel. Its first chain has the time of both.
    """

    why_not: str
    way: Way = Way.FUSED
    fallback_us: float = 0.0
    fused_us: float = 0.0
    both: Any = None


def judged(chain: Chain, *, is_eager: bool = True) -> Judged:
    """Whether a chain is worth a fused call on its device, at the sizes of the call that is being compiled.

    On a CPU the planner predicts nothing, and everything that can be fused is. `is_eager`: operators that are not fused
    run one by one, and no other compiler makes one kernel of several.
    """
    place = place_of(chain)
    if place is None:
        return Judged("" if chain.product.value.is_cpu else "epigemm's kernels do not run on this GPU")
    is_8_bits = chain.product.scales is not None
    if is_8_bits and not chain.computes:
        return Judged(SLOWER)  # at best as fast as PyTorch's
    recorded = chain.product.value.requires_grad
    found = judged_there(call_of(chain), place, is_recorded=recorded)
    if is_eager and not is_8_bits and found.why_not in (SLOWER, RECORDED) and chain.product.ends is None:
        return in_two_kernels(chain, found, place)
    return found


def place_of(chain: Chain) -> Tensor | None:
    """A tensor on a chain's device; None if epigemm's kernels do not run there."""
    value = chain.product.value
    place = None if value.is_cpu else torch.empty(0, device=value.device)
    return place if place is not None and plans.has_gpu_kernels(place) else None


def in_two_kernels(chain: Chain, found: Judged, place: Tensor) -> Judged:
    """Whether a chain without a fused kernel should run as PyTorch's GEMM and one elementwise kernel behind it.

    It should if that replaces two or more kernels, and moves fewer bytes. If autograd records it, the product is kept,
    and the derivative of what follows is one kernel, too. It should not if a vector needs a gradient, which that kernel
    would write as a matrix first.
    """
    behind = kernels_behind(chain)
    if chain.epilogue is None or chain.norm is not None or len(behind) < _FEWEST:
        return found
    product = chain.product.value
    # One kernel reads the product and matrices, and writes one.
    if moved_us([product, product, *map(value_at, chain.matrices)]) > _WORTH * sum(map(device_us, behind)):
        return found
    recorded = product.requires_grad
    if recorded and any(_learns(each, chain) for each in chain.operands):
        return found
    call = call_of(chain, is_product_alone=False)
    like = torch.empty(0, dtype=call.x.dtype, device=place.device)
    for kind in list(Kind)[: 2 if recorded else 1]:
        kernel = elementwise_kernels.missing(call.epilogue, like, kind)
        if not call.epilogue.is_compiled and loader.would_link(call.epilogue, kernel, place.device):
            return found
    return found._replace(why_not="", way=Way.TWO_KERNELS, fused_us=found.fallback_us)


def plain_us(judged: Judged, behind: list[fx.Node]) -> float:
    """The time of a chain operator by operator. The fallback's time has one of them, or a ReLU, in it."""
    more = sorted(map(device_us, behind))
    return judged.fallback_us + sum(more if judged.way == Way.FALLBACK else more[:-1])


def notes(chain: Chain, found: Judged) -> tuple[str, ...]:
    """The report's note on how a chain runs; none for one kernel."""
    if found.way is not Way.TWO_KERNELS:
        return ()
    behind = len(kernels_behind(chain))
    return (f"runs as PyTorch's GEMM and one elementwise kernel in the place of {behind}",)


def _learns(operand: ChainOperand, chain: Chain) -> bool:
    """Whether an operand, other than the product's bias or a matrix, needs a gradient."""
    if operand.eps is not None or operand.kind == MATRIX:
        return False
    (source,) = operand.sources
    value = tensor_of(source)
    return source is not chain.product.bias and value is not None and value.requires_grad


def judged_there(call: LinearCall, place: Tensor, *, is_recorded: bool = False) -> Judged:
    """The same for a call of meta tensors, on the device of `place`; `is_recorded`: by autograd."""
    found = dry_runs.dry_run(call, place=place, tried=True)
    way = Way.FUSED if found.fused else Way.FALLBACK
    is_usual = call.group_ends is None and call.eight_bits is None
    is_as_fast = found.gemm == dry_runs.WITH_BIAS_AND_RELU and not is_recorded and is_usual
    if is_recorded and call.x.dtype != torch.float32:
        why_not = RECORDED
    elif (way is Way.FALLBACK and not is_as_fast) or (
        call.group_ends is not None and not _saves_a_pass(call)
    ):
        why_not = SLOWER
    else:
        why_not = loader.would_link(call.epilogue, ",".join(found.missing), place.device)
    chosen = [each.plan for each in found.tried if each.arithmetic == found.arithmetic]
    fallback_us = plans.fallback_us(chosen[0] if chosen else found.tried[0].plan)
    return Judged(why_not, way, fallback_us, min([fallback_us, *map(plans.fused_us, chosen)]))


def _saves_a_pass(call: LinearCall) -> bool:
    """Whether a call of groups saves a pass over memory, for the planner has no time of PyTorch's grouped kernel.

    Nothing is saved if no more than casts follow the product, or if a matrix is cast to fp32 for it.
    """
    pairs = zip(call.epilogue.operands, call.operands, strict=True)
    is_wide = any(
        each.kind == MATRIX and isinstance(value, Tensor) and value.dtype is torch.float32
        for each, value in pairs
    )
    steps = [] if call.epilogue.is_bias else call.epilogue.traced.program.steps
    return not is_wide and any(step.op != "copy" for step in steps)


def call_of(chain: Chain, *, is_product_alone: bool | None = None) -> LinearCall:
    """The call that a chain becomes, of meta tensors; or its product alone.

    None: the product alone if autograd records the call and keeps the product.
    """
    product = chain.product
    x, weight = tensor_of(product.x), tensor_of(product.weight)
    assert x is not None and weight is not None
    m, k, n = math.prod(map(hint, x.shape[:-1])), hint(x.shape[-1]), hint(product.value.shape[-1])
    dtype = product.value.dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    factors = empty(m, k), empty(k, n).t() if product.is_kn else empty(n, k)
    if (of_8_bits := _of_8_bits(chain, m, n)) is not None:
        factors = empty(m, k, of=x.dtype), empty(n, k, of=weight.dtype)
    ends = None
    if product.ends is not None:
        groups, strides = hint(weight.shape[0]), [hint(weight.stride(axis)) for axis in (0, 2, 1)]
        factors = factors[0], torch.empty_strided((groups, n, k), strides, dtype=dtype, device="meta")
        ends = empty(groups, of=torch.int32)
    operands: list[Tensor | float | None] = []
    for operand in chain.operands:
        value = tensor_of(operand.sources[0])
        if operand.eps is not None:
            operands += [empty(n, of=torch.float32), empty(n, of=torch.float32)]
        elif operand.kind == SCALAR or value is None:
            operands.append(0.0)
        else:  # of rows that are shared one stands for all
            shape = KINDS[operand.kind].shape((1 if operand.shared else m,), n)
            if ends is not None and KINDS[operand.kind].is_of_columns:
                shape = (groups, n)
            operands.append(empty(*shape, of=value.dtype))
    epilogue: Epilogue = BIAS
    if chain.epilogue is not None:
        of_operands = dtype if of_8_bits is None else operand_dtype(of_8_bits)
        epilogue = forms.of_types(chain.epilogue.traced, factors[0], operands, of_operands)
    elif chain.norm is not None:
        epilogue, operands = SCALE_BATCH_NORM, operands[-2:]
    else:
        operands = [None if product.bias is None else empty(n)]
    call = LinearCall(epilogue, *factors, operands, eight_bits=of_8_bits, group_ends=ends)
    if is_product_alone is None and ends is None:
        is_product_alone = product.value.requires_grad and gradients.keeps_product(call)
    return call.product() if is_product_alone else call


def _of_8_bits(chain: Chain, m: int, n: int) -> EightBits | None:
    scales = chain.product.scales
    if scales is None:
        return None

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    across = hint(value_at(scales.x).shape[-1]) if scales.are_blocks else 0
    counts = (scales.x, m), (scales.weight, n)
    both = [empty() if known(value_at(each).numel() == 1) else empty(count) for each, count in counts]
    if scales.are_blocks:
        both = [empty(m, across), empty(blocks(n), across)]
    out_scale = empty() if isinstance(chain.out_scale, fx.Node) else chain.out_scale
    return EightBits(both[0], both[1], chain.dtype, scales.accumulate, out_scale)


# --- elementwise kernels, by the bytes that they move ----------------------------------------------------------------


def kernels_behind(chain: Chain) -> list[fx.Node]:
    """The nodes of a chain behind its product that launch kernels in eager mode."""
    return [node for node in chain.nodes[1:] if not effects_of(node).is_view]


def device_us(node: fx.Node) -> float:
    """The time of an elementwise kernel: that of moving its bytes."""
    tensors = [tensor for each in (node, *node.all_input_nodes) if (tensor := tensor_of(each)) is not None]
    return moved_us(tensors)


def moved_us(tensors: Sequence[Tensor]) -> float:
    """The time of a kernel that moves some tensors and computes little."""
    device = next((tensor.get_device() for tensor in tensors if tensor.is_cuda), -1)
    moved = sum(math.prod(map(hint, tensor.shape)) * tensor.element_size() for tensor in tensors)
    return _LEAST_US + moved / _bytes_per_us(device)


@functools.cache
def _bytes_per_us(device: int) -> float:
    about: Any = torch.cuda.get_device_properties(device) if device >= 0 else None
    kilohertz, bits = (getattr(about, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    nominal = 2e3 * kilohertz * bits / 8 / 1e6  # two transfers a cycle
    return _OF_NOMINAL * nominal or _BYTES_PER_US
