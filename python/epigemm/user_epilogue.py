"""A Python function as the epilogue of a linear layer: what `epigemm.epilogue` makes of one with one result."""

from __future__ import annotations

from torch import Tensor

from epigemm import route as _route
from epigemm.decoration import Decorated
from epigemm.epilogues.declaration import Traced
from epigemm.packs.weight_packs import PackedWeight


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
            named: operands by name.

        Returns:
            `[..., N]`, of x's dtype; under autocast of what PyTorch promotes the product and the operands to.

        Raises:
            TypeError: an operand that is missing, unknown or given twice, or no tensor or number.
            ValueError: unknown precision.
            RuntimeError: a shape, dtype, device or layout that does not fit; `strict`, and no fused kernel would run.
            NotImplementedError: under `torch.export` or `torch.jit.trace`.

        Example:
            >>> y = swish_clamp(x, weight, bias, residual, limit=0.5)
        """
        traced, given = self.form(operands, named)
        return _route.linear(traced, x, weight, given, out, precision, strict)

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
