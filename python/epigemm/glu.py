"""`linear_glu`: two products of one x, one of them activated, are multiplied. Conventions as of `epigemm.functional`.

A plain call in 16 or 8 bits runs as one kernel, where that is expected to be faster. There is no operator for it: every
other call is one of `linear` and one of `linear_gated`, whose operators have derivatives, fake kernels and vmap rules.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epigemm import docstrings
from epigemm import route as _route
from epigemm.arguments import autocast, eight_bits, forms, invariance, pairs
from epigemm.arguments.calls import UNSCALED, EightBits, LinearCall, OutScale, Scaled, operand_dtype
from epigemm.arguments.pairs import Pair
from epigemm.arguments.precision import DEFAULT, PROMOTED
from epigemm.autograd import group_products
from epigemm.calls import entry, forecast, one_kernel
from epigemm.calls.log import current
from epigemm.compilers import is_traced
from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.formulas import BIAS2
from epigemm.epilogues.library import BIAS, FUNCTIONS
from epigemm.functional import GATES, gate_function
from epigemm.operators import groups
from epigemm.packs.weight_packs import PackedWeight
from epigemm.planner.reasons import Reason

__all__ = ["linear_glu"]

_OF_PAIRS = {torch.float16, torch.bfloat16}


@docstrings.of_linear
def linear_glu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    weight2: Tensor | PackedWeight | None = None,
    bias2: Tensor | None = None,
    activation: str = "silu",
    out: Tensor | None = None,
    precision: str | None = None,
    strict: bool = False,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: OutScale = None,
    accumulate: str = "promoted",
) -> Tensor:
    """D = activation(x @ W1.T + b1) * (x @ W2.T + b2): the gated layers of transformers (SwiGLU, GeGLU, ...).

    With one weight of 2N rows W1 is its first half, W2 its second one, and so of the bias: the first half is activated,
    as in Phi-3's `gate_up_proj`. Views are taken, no copies. With `weight2` W1 is `weight` and W2 `weight2`, each of N
    rows: Llama's, Gemma's and Mixtral's `gate_proj` (`w1`) and `up_proj` (`w3`), T5's `wi_0` and `wi_1`.

    `torch.nn.functional.glu` and diffusers' `GEGLU` activate the second half. Their layers are
    `linear_glu(x, weight[n:], bias[n:], weight2=weight[:n], bias2=bias[:n])`, with n half of the rows.

    Matches, for two weights, `torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)) *
    torch.nn.functional.linear(x, weight2, bias2)`. In fp16 and bf16, where no gradient is recorded and no compiler
    traces the call, one kernel computes both products if that is expected to be faster, and rounds once. Otherwise two
    kernels run: the second product, rounded to x's dtype, then the first one with its activation and the
    multiplication. `strict` asks for a fused kernel of the latter. Where the other factor is there already,
    `linear_gated` takes it.

    In 8 bits the rows' scales of two weights are one vector `[2N]`, those of `weight` first, and those of blocks
    `[2 * ceil(N / 128), ceil(K / 128)]`, where one weight has an N of whole 128; a 0-d one is for both. One kernel
    computes both products of e4m3 tensors, but not if sums are promoted to a result in blocks.

    Example:
        >>> epigemm.linear_glu(torch.randn(8, 64), torch.randn(2 * 32, 64)).shape
        torch.Size([8, 32])
        >>> epigemm.linear_glu(torch.randn(8, 64), torch.randn(32, 64), weight2=torch.randn(32, 64)).shape
        torch.Size([8, 32])
    """
    if isinstance(weight, PackedWeight):
        if weight2 is None:
            raise TypeError(
                "weight: got a PackedWeight with the rows of both products; accepted is a tensor, or a PackedWeight of "
                "each half, the second one as weight2"
            )
        weight = weight.weight
    if isinstance(weight2, PackedWeight):
        weight2 = weight2.weight
    given = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    return glu(activation, (x, weight, bias, weight2, bias2, None), out, precision, strict, given)


def glu(
    activation: str,
    pair: Pair,
    out: Tensor | None,
    precision: str | None = None,
    strict: bool = False,
    given: Scaled = UNSCALED,
) -> Tensor:
    """D = activation(x @ W1.T + b1) * (x @ W2.T + b2) of a pair: one kernel, or two calls."""
    whole = pair[:3] if pair[3] is None else None
    function = (GATES.get(activation) if type(activation) is str else None) or gate_function(activation)
    x_scale, weight_scale, out_dtype, accumulate, out_scale = given
    is_any = x_scale is not None or weight_scale is not None or out_dtype is not None or out_scale is not None
    is_8_bits = is_any or accumulate != PROMOTED
    found: Tensor | Reason | None = None
    is_usual = pair[3] is not None and precision is None and strict is False and not is_8_bits
    if is_usual and current.log is None and not is_traced() and not autocast.is_any_on():
        types = {getattr(each, "dtype", None) for each in pair[::2] if each is not None}
        if len(types) == 1 and types < _OF_PAIRS:
            # Before the checks: the entry makes them faster. But it takes biases in fp32, too.
            found = one_kernel.pair(pair_call(function, pair, out))
    if isinstance(found, Tensor):
        return found
    scaled: EightBits | None = None
    if found is not Reason.NO_PAIR:  # else the arguments fit
        pair, scaled = pairs.checked(pair, out, precision, strict, given if is_8_bits else None)
    x, weight, bias, weight2, bias2, offs = pair
    if offs is not None and whole is not None and out is None and _is_recorded(*whole):
        # Of one weight: two halves would each have a gradient as large as the whole, most of it zeros.
        both = _route.linear(BIAS, *whole[:2], whole[2:], None, precision, False, offs=offs)
        first_of_both, gate = both.chunk(2, 1)
        epilogue = forms.of_types(function, both, (None, gate), None)
        return group_products.applied(epilogue, first_of_both, (None, gate))
    memory: OutScale = None
    may_be_one = offs is not None or (not is_traced() and (is_8_bits or x.dtype in _OF_PAIRS))
    if found is None and may_be_one:
        if scaled is not None:
            memory = eight_bits.memory_of_blocks(scaled.out_scale, x, weight)
        found = groups.pair(pair_call(function, pair, out, scaled and scaled._replace(out_scale=memory)))
        if isinstance(found, Tensor):
            return eight_bits.with_blocks(found, memory)
    first, of_gate = (UNSCALED, UNSCALED) if scaled is None else eight_bits.of_products(scaled)
    if strict and entry.sees(x, weight) is not entry.NOT_PLAIN:
        _require_fused(function, pair, precision, scaled and EightBits(*of_gate))
    assert weight2 is not None
    gate = _route.linear(BIAS, x, weight2, (bias2,), None, precision, False, of_gate, offs=offs)
    return _route.linear(function, x, weight, (bias, gate), out, precision, strict, first, offs=offs)


def _is_recorded(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)


def pair_call(
    function: Traced, pair: Pair, out: Tensor | None, scaled: EightBits | None = None
) -> LinearCall:
    """A pair in 16 or 8 bits as one call; `function`: what follows the first product."""
    x, weight, bias, weight2, bias2, offs = pair
    if offs is not None:  # kernels read the vectors of all groups without gaps
        bias, bias2 = (each if each is None else each.contiguous() for each in (bias, bias2))
    operands: tuple[Tensor | None, ...] = (bias, None)
    if bias2 is not None:
        function, operands = FUNCTIONS[function.name + BIAS2], (bias, bias2, None)
    is_invariant = invariance.active and invariance.enabled()
    made = forms.of_types(function, x, operands, None if scaled is None else operand_dtype(scaled))
    precision = DEFAULT if scaled is None else scaled.accumulate
    about = (precision, True, False, is_invariant, out, weight2)
    return LinearCall(made, x, weight, operands, *about, eight_bits=scaled, group_ends=offs)


def _require_fused(
    function: Traced, pair: Pair, precision: str | None, scaled: EightBits | None = None
) -> None:
    """RuntimeError, before the second product is launched, where no fused kernel would run the first one."""
    x, weight, bias, _, _, _ = pair
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    dtype = x.dtype if scaled is None else operand_dtype(scaled)
    operands = (bias, x.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype))
    epilogue = forms.of_types(function, x, operands, dtype)
    asked = precision or (DEFAULT if scaled is None else scaled.accumulate)
    call = LinearCall(epilogue, rows, weight, operands, asked, strict=True, eight_bits=scaled)
    if not call.is_empty:
        forecast.require_fused(call)
