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
from epigemm.arguments import autocast, checks, eight_bits, forms, invariance
from epigemm.arguments.calls import (
    EightBits,
    LinearCall,
    OutScale,
    Scaled,
    operand_dtype,
    scales_read,
)
from epigemm.arguments.precision import DEFAULT, PROMOTED
from epigemm.calls import entry, forecast, one_kernel
from epigemm.calls.log import current
from epigemm.compilers import is_traced
from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.formulas import BIAS2
from epigemm.epilogues.library import BIAS, FUNCTIONS
from epigemm.functional import gate_function
from epigemm.packs.weight_packs import PackedWeight
from epigemm.planner.reasons import Reason

__all__ = ["linear_glu"]

_OF_PAIRS = {torch.float16, torch.bfloat16}


def pair_call(
    function: Traced,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    out: Tensor | None,
    scaled: EightBits | None = None,
) -> LinearCall:
    """A pair in 16 or 8 bits as one call; `function`: what follows the first product."""
    operands: tuple[Tensor | None, ...] = (bias, None)
    if bias2 is not None:
        function, operands = FUNCTIONS[function.name + BIAS2], (bias, bias2, None)
    is_invariant = invariance.active and invariance.enabled()
    made = forms.of_types(function, x, operands, None if scaled is None else operand_dtype(scaled))
    precision = DEFAULT if scaled is None else scaled.accumulate
    about = {"invariant": is_invariant, "out": out, "weight2": weight2, "eight_bits": scaled}
    return LinearCall(made, x, weight, operands, precision, **about)  # type: ignore[arg-type]


def _require_fused(
    function: Traced,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: str | None,
    scaled: EightBits | None = None,
) -> None:
    """RuntimeError, before the second product is launched, where no fused kernel would run the first one."""
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    dtype = x.dtype if scaled is None else operand_dtype(scaled)
    operands = (bias, x.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype))
    epilogue = forms.of_types(function, x, operands, dtype)
    call = LinearCall(epilogue, rows, weight, operands, precision or DEFAULT, strict=True, eight_bits=scaled)
    if not call.is_empty:
        forecast.require_fused(call)


def _check_out(out: Tensor, x: Tensor, others: dict[str, Tensor | None]) -> None:
    """RuntimeError, before the second product is launched, for an `out` that the first one could not be written to."""
    tensors = (out, x, *(each for each in others.values() if each is not None))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise RuntimeError(
            "linear_glu(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    checks.own_memory(out, x, others.items())


def _scaled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight2: Tensor | None,
    bias2: Tensor | None,
    out: Tensor | None,
    given: Scaled,
) -> EightBits:
    """What a call gives of 8 bits, after its checks."""
    eight_bits.types(x, weight)
    scaled = eight_bits.checked(x, weight, given, weight2)
    others = {"weight": weight, "bias": bias, "weight2": weight2, "bias2": bias2, **dict(scales_read(scaled))}
    eight_bits.refuse_gradients(x=x, **others)
    if out is not None:
        checks.own_memory(out, x, others.items())
    return scaled


def _of_eight_bits(
    function: Traced,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    out: Tensor | None,
    strict: bool,
    scaled: EightBits,
) -> Tensor:
    """A pair of 8-bit numbers whose arguments have been checked: one kernel, or two calls."""
    if not is_traced():
        memory = eight_bits.memory_of_blocks(scaled.out_scale, x, weight)
        of_pair = scaled._replace(out_scale=memory)
        found = one_kernel.pair(pair_call(function, x, weight, bias, weight2, bias2, out, of_pair))
        if isinstance(found, Tensor):
            return eight_bits.with_blocks(found, memory)
    scale: Tensor = scaled.weight_scale  # type: ignore[assignment]
    first, second = (scale, scale) if scale.dim() == 0 else scale.chunk(2)
    wide = scaled._replace(out_dtype=operand_dtype(scaled), out_scale=None)
    if strict and entry.sees(x, weight) is not entry.NOT_PLAIN:
        _require_fused(function, x, weight, bias, scaled.accumulate, wide._replace(weight_scale=first))
    gate = _route.linear(BIAS, x, weight2, (bias2,), None, None, False, wide._replace(weight_scale=second))
    operands = (bias, gate)
    return _route.linear(
        function, x, weight, operands, out, None, strict, scaled._replace(weight_scale=first)
    )


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

    In 8 bits the rows' scales of two weights are one vector `[2N]`, those of `weight` first; a 0-d one is for both. One
    kernel computes both products of e4m3 tensors, but not if sums are promoted to a result in blocks.

    Example:
        >>> epigemm.linear_glu(torch.randn(8, 64), torch.randn(2 * 32, 64)).shape
        torch.Size([8, 32])
        >>> epigemm.linear_glu(torch.randn(8, 64), torch.randn(32, 64), weight2=torch.randn(32, 64)).shape
        torch.Size([8, 32])
    """
    function = gate_function(activation)
    if isinstance(weight, PackedWeight):
        if weight2 is None:
            raise TypeError(
                "weight: got a PackedWeight with the rows of both products; accepted is a tensor, or a PackedWeight of "
                "each half, the second one as weight2"
            )
        weight = weight.weight
    other = weight2.weight if isinstance(weight2, PackedWeight) else weight2
    given = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
    is_any = x_scale is not None or weight_scale is not None or out_dtype is not None or out_scale is not None
    is_8_bits = is_any or accumulate != PROMOTED
    found: Tensor | Reason | None = None
    is_usual = precision is None and strict is False and current.log is None and not is_8_bits
    if is_usual and other is not None and not is_traced() and not autocast.is_any_on():
        types = {getattr(each, "dtype", None) for each in (x, bias, bias2) if each is not None}
        if len(types) == 1 and types < _OF_PAIRS:
            # Before the checks: the entry makes them faster. But it takes biases in fp32, too.
            found = one_kernel.pair(pair_call(function, x, weight, bias, other, bias2, out))
    if isinstance(found, Tensor):
        return found
    if other is not None and found is Reason.NO_PAIR:  # the arguments fit
        gate = _route.linear(BIAS, x, other, (bias2,))
        return _route.linear(function, x, weight, (bias, gate), out)
    checks.tensors(x=x, weight=weight)
    checks.optional_tensors(bias=bias, weight2=other, bias2=bias2, out=out)
    if out is not None:
        _check_out(out, x, {"weight": weight, "bias": bias, "weight2": other, "bias2": bias2})
    if precision is not None:
        checks.precision(precision)
    if strict is not False:
        checks.flag("strict", strict)
    if autocast.is_any_on() and not is_8_bits:
        x, weight, (bias, other, bias2) = autocast.cast(x, weight, bias, other, bias2)
    scaled = _scaled(x, weight, bias, other, bias2, out, given) if is_8_bits else None
    checks.pair(x, weight, bias, other, bias2, out, scaled)
    if other is None:
        # Views, by one node of autograd, which writes both gradients into one tensor.
        weight, other = weight.chunk(2)
        if bias is not None:
            bias, bias2 = bias.chunk(2)
    if scaled is not None:
        return _of_eight_bits(function, x, weight, bias, other, bias2, out, strict, scaled)
    if found is None and x.dtype in _OF_PAIRS and not is_traced():
        found = one_kernel.pair(pair_call(function, x, weight, bias, other, bias2, out))
        if isinstance(found, Tensor):
            return found
    if strict and entry.sees(x, weight) is not entry.NOT_PLAIN:
        _require_fused(function, x, weight, bias, precision)
    gate = _route.linear(BIAS, x, other, (bias2,), None, precision)
    return _route.linear(function, x, weight, (bias, gate), out, precision, strict)
