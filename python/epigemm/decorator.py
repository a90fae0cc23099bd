"""`epigemm.epilogue`: a Python function becomes the epilogue of a linear layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from epigemm import progress
from epigemm import route as _route
from epigemm.arguments.calls import is_scaled
from epigemm.decoration import Decorated
from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.signatures import call_doc, call_signature
from epigemm.packs.weight_packs import PackedWeight
from epigemm.results_epilogue import ResultsEpilogue


@overload
def epilogue(function: Callable[..., Tensor]) -> UserEpilogue: ...


@overload
def epilogue(function: Callable[..., tuple[Any, ...] | list[Any]]) -> ResultsEpilogue: ...


def epilogue(function: Callable[..., Any]) -> UserEpilogue | ResultsEpilogue:
    """Make a Python function the epilogue of a linear layer: one kernel computes the product and the function.

    The function is ordinary pointwise PyTorch of the accumulator `[M, N]` and of operands annotated with
    `epigemm.PerColumn`, `PerRow`, `Scalar` or `Matrix`; at most 4, 2, 4 and 2 of them. It is traced once, at
    decoration. It computes in fp32 (in fp64 for fp64 tensors): operands are read in fp32, and the result is rounded
    to x's dtype. A fused kernel rounds once; where PyTorch's GEMM runs, the product is rounded first. Scalars are
    run-time values. Numbers that the function reads from outside are constants, as they are at decoration.

    The function may return several results, as a tuple or list: matrices, and reductions of a matrix along one axis
    (`sum`, `mean`, `amax`, `amin`, `var`, `var_mean`). Then one kernel computes the product and the step that all
    results share. The other matrices and the reductions are separate launches.

    A kernel is linked when a call first needs it, which takes a second or two, and kept on disk. This needs NVRTC and
    nvJitLink 13 (`pip install epigemm[jit]`). Without them, and on CPUs, PyTorch's GEMM runs, and then the function.

    Args:
        function: its first argument is the accumulator, the others are operands. A Scalar may have a number as its
            default. Up to three others may have None, which the function then gets if a call does not give them.

    Returns:
        An object that is called as `f(x, weight, *operands, out=None, precision=None, strict=False)`; see
        `UserEpilogue`. For a function with several results, or with a reduction, a `ResultsEpilogue`; it has no `out`.

    Raises:
        TypeError: a signature, a captured value or a result that no epilogue has.
        ValueError: too many operands of a kind.
        NotImplementedError: the function is not pointwise, reads a reduction, a value, a shape or a device, writes in
            place, draws random numbers or uses a captured tensor. The message names the line.

    Example:
        >>> @epigemm.epilogue
        ... def swish_clamp(
        ...     acc, bias: epigemm.PerColumn, residual: epigemm.Matrix, limit: epigemm.Scalar = 6.0
        ... ):
        ...     z = acc + bias
        ...     return torch.clamp(z * torch.sigmoid(z), -limit, limit) + residual
        >>> y = swish_clamp(x, weight, bias, residual, limit=0.5)
    """
    # The first one in a process imports torch._dynamo, for symbolic sizes, which takes seconds.
    with progress.doing(f"tracing the epilogue {getattr(function, '__name__', function)}"):
        traced = trace(function)
        made = UserEpilogue(traced) if isinstance(traced, Traced) else ResultsEpilogue(traced)
    functools.update_wrapper(made, function)
    results = None if isinstance(traced, Traced) else traced.results
    about = vars(made)
    about["_decorator"] = epilogue
    about["__signature__"] = call_signature(traced.operands, takes_out=results is None)
    about["__doc__"] = call_doc(function.__doc__, traced.name, traced.operands, results)
    return made


# --- functions with one result ----------------------------------------------------------------------------------------


class UserEpilogue(Decorated):
    """A user's function as the epilogue of a linear layer; made by `epigemm.epilogue`."""

    traced: Traced
    without: dict[tuple[int, ...], Traced]

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced)
        # If an operand is None, the epilogue is another one, of the remaining operands.
        self.without = {(): traced, **traced.without}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        /,
        *operands: Tensor | float | None,
        out: Tensor | None = None,
        precision: str | None = None,
        strict: bool = False,
        x_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out_scale: Tensor | float | str | None = None,
        accumulate: str = "promoted",
        offs: Tensor | None = None,
        **named: Tensor | float | None,
    ) -> Tensor:
        """D = f(x @ weight.T, operands...).

        Args:
            x: `[..., K]`, fp16, bf16, fp32 or fp64.
            weight: `[N, K]`, or an `epigemm.PackedWeight`.
            operands: in the function's order; or by name. PerColumn `[N]`, PerRow x's shape without its last axis,
                Matrix the result's shape, or that with 1 in place of its last leading axes (`[B, 1, N]` for a result
                `[B, L, N]`), all of x's dtype, or fp32 beside 16 bits; Scalar a number or a 0-d tensor. One with the
                default None may be left out, or None.
            out: `[..., N]`, written in place of a new tensor.
            precision: of fp32 products, as for `epigemm.linear`.
            strict: RuntimeError where no fused kernel would run.
            x_scale: this and the next four of an x of 8 bits, as for `epigemm.linear`.
            weight_scale: see x_scale.
            out_dtype: see x_scale. The operands have this type, bf16 beside an e4m3 result, or fp32.
            out_scale: see x_scale.
            accumulate: see x_scale.
            offs: int32 `[groups]`: rows of x are in groups that end there, as for `epigemm.grouped_linear`. The weight
                is `[groups, N, K]` then, and PerColumn operands `[groups, N]`. The result has x's dtype, under autocast
                autocast's.
            named: operands by name.

        Returns:
            `[..., N]`, of x's dtype; under autocast of what PyTorch promotes the product and the operands to; in 8 bits
            of `out_dtype`, and with `out_scale="1x128"` a pair of it and the scales of its blocks.

        Raises:
            TypeError: an operand that is missing, unknown or given twice, or no tensor or number.
            ValueError: unknown precision.
            RuntimeError: a shape, dtype, device or layout that does not fit; `strict`, and no fused kernel would run.
            NotImplementedError: under `torch.export` or `torch.jit.trace`.

        Example:
            >>> y = swish_clamp(x, weight, bias, residual, limit=0.5)
        """
        traced, given = self.form(operands, named)
        scaled = (x_scale, weight_scale, out_dtype, accumulate, out_scale)
        if offs is not None and (precision is not None or is_scaled(scaled)):
            raise RuntimeError(
                "offs: got a tensor beside a precision or an argument of 8 bits; accepted is one or the other"
            )
        return _route.linear(traced, x, weight, given, out, precision, strict, scaled, offs=offs)

    def elementwise(
        self,
        z: Tensor,
        /,
        *operands: Tensor | float | None,
        out: Tensor | None = None,
        **named: Tensor | float | None,
    ) -> Tensor:
        """D = f(z, operands...), without a product: one elementwise kernel.

        Args:
            z: `[..., N]`, fp16, bf16, fp32 or fp64; the function's first argument.
            operands: as of a call.
            out: of z's shape, or z itself.
            named: operands by name.

        Returns:
            A tensor of z's shape and dtype.

        Raises:
            TypeError: an operand that is missing, unknown or given twice, or no tensor or number.
            RuntimeError: a shape, dtype, device or layout that does not fit.

        Example:
            >>> y = swish_clamp.elementwise(z, bias, residual, limit=0.5)
        """
        traced, given = self.form(operands, named)
        return _route.elementwise(traced, z, given, out)
