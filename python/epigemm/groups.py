"""`grouped_linear`: rows in groups, each multiplied by a weight of its own, as the experts of a mixture are.

On Hopper, where autograd does not record a call, one kernel computes all groups and the epilogue, in fp32 on fp16
slices. It reads on the device where the groups end, so nothing waits for the host. Every other call is one of PyTorch's
grouped product (in fp32 on Hopper of this kernel) and its pointwise operators, which are one elementwise kernel where
autograd records the call (`autograd/group_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from epigemm import route as _route
from epigemm.arguments import checks
from epigemm.decoration import Decorated
from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.library import BIAS, BIAS_RELU, BIAS_SILU, BIAS_TANH, gelu_epilogue
from epigemm.glu import glu

__all__ = ["grouped_linear", "grouped_linear_glu"]

ACTIVATIONS = {
    "identity": BIAS,
    "relu": BIAS_RELU,
    "gelu": gelu_epilogue("none"),
    "gelu_tanh": gelu_epilogue("tanh"),
    "silu": BIAS_SILU,
    "tanh": BIAS_TANH,
}


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    offs: Tensor,
    epilogue: str | Callable[..., Tensor] = "identity",
    out: Tensor | None = None,
    strict: bool = False,
) -> Tensor:
    """D[m] = epilogue(x[m] @ weight[g].T + bias[g]), g the group of row m: the experts of a mixture.

    Rows of x lie group by group: group g has the rows from `offs[g - 1]` (0 for the first one) up to `offs[g]`. A group
    may be empty. An end that falls counts as the end before it, and one beyond x as x's. Rows behind the last group are
    left as they are in `out`, and are undefined in a new result; their gradient is 0.

    Matches `torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offs)` and what follows it.

    Args:
        x: `[M, K]`, fp16, bf16, fp32 or fp64.
        weight: `[groups, N, K]`, of x's dtype.
        bias: `[groups, N]` or None.
        offs: `[groups]`, int32, contiguous, on x's device.
        epilogue: "identity", "relu", "gelu", "gelu_tanh", "silu" or "tanh"; or a function made by `epigemm.epilogue`
            that has the bias as its only operand, or none. Others are called with `offs=` themselves.
        out: `[M, N]`, written in place of a new tensor.
        strict: RuntimeError where no fused kernel would run.

    Returns:
        `[M, N]`, of x's dtype.

    Raises:
        TypeError: an argument is not a tensor (or None where that is accepted).
        ValueError: an unknown epilogue.
        RuntimeError: a shape, dtype, device or layout that does not fit; `strict`, and no fused kernel would run.

    Example:
        >>> x, weight = torch.randn(6, 64), torch.randn(3, 32, 64)
        >>> offs = torch.tensor([2, 2, 6], dtype=torch.int32)  # two rows, none, four
        >>> epigemm.grouped_linear(x, weight, offs=offs, epilogue="silu").shape
        torch.Size([6, 32])
    """
    checks.tensors(offs=offs)
    if isinstance(epilogue, Decorated) and isinstance(epilogue.traced, Traced):
        operands = (bias,) if bias is not None else ()
        return epilogue(x, weight, *operands, offs=offs, out=out, strict=strict)
    names = ", ".join(map(repr, ACTIVATIONS))
    if not isinstance(epilogue, str):
        raise TypeError(
            f"epilogue: got {epilogue!r}; accepted are {names}, and functions with one result made by epigemm.epilogue"
        )
    if epilogue not in ACTIVATIONS:
        raise ValueError(f"epilogue: got {epilogue!r}; accepted are {names}")
    return _route.linear(ACTIVATIONS[epilogue], x, weight, (bias,), out, None, strict, offs=offs)


def grouped_linear_glu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    offs: Tensor,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """D[m] = activation(x[m] @ W1[g].T + b1[g]) * (x[m] @ W2[g].T + b2[g]): `linear_glu` of rows in groups.

    With one weight of 2N rows a group W1 is its first half, W2 its second one, and so of the bias. On Hopper,
    where autograd does not record a call in 16 bits, one kernel computes both products of all groups.

    Args:
        x: `[M, K]`, fp16, bf16, fp32 or fp64.
        weight: `[groups, 2N, K]`, or `[groups, N, K]` with weight2.
        bias: `[groups, 2N]`, or `[groups, N]` with weight2; or None.
        offs: as of `grouped_linear`.
        weight2: `[groups, N, K]`.
        bias2: `[groups, N]` or None; only with weight2.
        activation: "silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh" or "identity" (none).
        out: `[M, N]`, written in place of a new tensor.

    Returns:
        `[M, N]`, of x's dtype.

    Raises:
        TypeError: an argument is not a tensor (or None where that is accepted).
        ValueError: an unknown activation.
        RuntimeError: a shape, dtype, device or layout that does not fit.

    Example:
        >>> x, weight = torch.randn(6, 64), torch.randn(3, 2 * 32, 64)
        >>> offs = torch.tensor([2, 2, 6], dtype=torch.int32)
        >>> epigemm.grouped_linear_glu(x, weight, offs=offs).shape
        torch.Size([6, 32])
    """
    checks.tensors(offs=offs)
    return glu(activation, (x, weight, bias, weight2, bias2, offs), out)
