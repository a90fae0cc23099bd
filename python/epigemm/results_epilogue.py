"""A Python function with several results, or with a reduction, as the epilogue of a linear layer.

`epigemm.epilogues.parts` takes the function apart: the product and what all results share are one kernel, each other
matrix is an elementwise one, reductions are PyTorch's operators. All of these are calls that differentiate, batch and
compile by themselves, and so do calls with several results. Where no gradient is recorded, one kernel may compute two
matrices behind the product, if these are all that is read (`epigemm.calls.one_kernel`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm import route as _route
from epigemm.arguments import autocast, checks, forms, invariance
from epigemm.arguments.calls import LinearCall, Options
from epigemm.arguments.forms import Function
from epigemm.arguments.precision import ARITHMETIC, DEFAULT
from epigemm.calls import one_kernel, reductions
from epigemm.calls.layouts import unflattened
from epigemm.calls.log import current
from epigemm.compilers import is_traced
from epigemm.decoration import Decorated
from epigemm.epilogues.declaration import Traced, TracedResults
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.parts import Matrix, Parts, take_apart
from epigemm.epilogues.registry import compute_dtype
from epigemm.epilogues.tracer.results import AMAX, AMIN, filled, structured
from epigemm.packs.weight_packs import PackedWeight

_tracing_state = torch._C._get_tracing_state
_any_autocast = autocast.is_any_on


class ResultsEpilogue(Decorated):
    """A user's function with several results, or with a reduction: made by `epigemm.epilogue`."""

    traced: TracedResults
    without: dict[tuple[int, ...], ResultsEpilogue]

    def __init__(self, traced: TracedResults) -> None:
        super().__init__(traced)
        others = {absent: ResultsEpilogue(each) for absent, each in traced.without.items()}
        self.without = {(): self, **others}
        self.results = traced.results.results
        # By whether x has the type of the arithmetic.
        self._parts = {is_exact: take_apart(traced, is_exact=is_exact) for is_exact in (True, False)}
        self._reduces_columns = any(not each.is_stored and each.axis == 0 for each in self.results)
        # Whether each result is a matrix of its own in x's dtype.
        self._are_matrices = all(each.is_stored and not each.is_fp32 for each in self.results)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        /,
        *operands: Tensor | float | None,
        out: None = None,
        precision: str | None = None,
        strict: bool = False,
        **named: Tensor | float | None,
    ) -> Any:
        """The results of f(x @ weight.T, operands...).

        The product and what all results share are one kernel, each other matrix is one more, and each reduction. Where
        two matrices are all that is read and no gradient is recorded, one kernel may compute both.

        Args:
            x: `[..., K]`, fp16, bf16, fp32 or fp64.
            weight: `[N, K]`, or an `epigemm.PackedWeight`.
            operands: as of `epigemm.UserEpilogue`.
            out: None. Results are new tensors: one that is written in place of another tensor could be an operand that
                a later kernel of the call reads.
            precision: of fp32 products, as for `epigemm.linear`.
            strict: RuntimeError where no fused kernel would run the product.
            named: operands by name.

        Returns:
            A tensor, or a tuple or list of tensors, as the function returns them. A matrix is `[..., N]`, of x's dtype,
            or fp32 where the function returns it after `float()`. A reduction is in fp32 (fp64 for fp64). That of each
            column is `[N]`, that of each row of x's shape without its last axis.

        Raises:
            TypeError: an operand that is missing, unknown or given twice, or no tensor or number.
            ValueError: unknown precision.
            IndexError: `amax` or `amin` of no elements.
            RuntimeError: a shape, dtype, device or layout that does not fit; `out`; `strict`, and no fused kernel would
                run; a reduction of each column in the batch-invariant mode.
            NotImplementedError: under `torch.export` or `torch.jit.trace`.

        Example:
            >>> y, z, total = gelu_with_sum(x, weight, bias)
        """
        options = Options(precision, strict)
        form: ResultsEpilogue
        form, given = self.form(operands, named)
        if isinstance(weight, PackedWeight):
            weight = weight.weight
        is_under_autocast = _any_autocast()
        # What one kernel computes the entry checks, if it sees all operands.
        is_known = out is None and current.log is None and not is_under_autocast
        are_usual = isinstance(x, Tensor) and not x.is_nested and isinstance(weight, Tensor)
        pair = form.parts(x.dtype).pair if are_usual else None
        is_seen = is_known and pair is not None and len(pair.places) == len(given)
        both = form._both(x, weight, given, options) if is_seen else None
        if both is not None:
            return form._results(both, given)
        if is_under_autocast and any(form.promoted_results(x, given)):
            z, others = _route.promoted(form.traced, x, weight, given, options)
            return form._narrowed(form.elementwise(z, *others, out=out), x, given)
        checks.tensors(x=x, weight=weight)
        if is_under_autocast:
            x, weight, _ = autocast.cast(x, weight)
        checks.product(x, weight)
        form._check(x, "x", (*x.shape[:-1], weight.shape[0]), given, out)
        both = None if is_seen else form._both(x, weight, given, options)
        if both is not None:
            return form._results(both, given)
        matrix = form.parts(x.dtype).matrices[0]
        function: Function = BIAS if matrix.traced is None else matrix.traced
        reads = (None,) if matrix.traced is None else [given[place] for place in matrix.places]
        shared = _route.linear(function, x, weight, reads, None, *options, promotes=False)
        return form._results({0: shared}, given)

    def promoted_results(self, x: Tensor, given: Sequence[Any]) -> list[bool]:
        """For each result whether it is a matrix that autocast makes fp32, by an operand."""
        return [autocast.promotes(x, [given[place] for place in typing]) for typing in self.traced.typing]

    def _narrowed(self, results: Any, x: Tensor, given: Sequence[Any]) -> Any:
        """Results in fp32, behind a product in autocast's type; each matrix in the type that PyTorch promotes it to."""
        values, _ = structured(results)
        for place, (result, is_fp32) in enumerate(
            zip(self.results, self.promoted_results(x, given), strict=True)
        ):
            if result.is_stored and not result.is_fp32 and not is_fp32:
                values[place] = values[place].to(autocast.dtype_for(x))
        return filled(self.traced.results.structure, values)

    def elementwise(
        self,
        z: Tensor,
        /,
        *operands: Tensor | float | None,
        out: None = None,
        **named: Tensor | float | None,
    ) -> Any:
        """The results of f(z, operands...), without a product.

        Args:
            z: `[..., N]`, fp16, bf16, fp32 or fp64; the function's first argument.
            operands: as of a call.
            out: None.
            named: operands by name.

        Returns:
            As of a call.

        Raises:
            TypeError: an operand that is missing, unknown or given twice, or no tensor or number.
            IndexError: `amax` or `amin` of no elements.
            RuntimeError: a shape, dtype, device or layout that does not fit; `out`; a reduction of each column in the
                batch-invariant mode.

        Example:
            >>> y, z, total = gelu_with_sum.elementwise(z, bias)
        """
        form: ResultsEpilogue
        form, given = self.form(operands, named)
        checks.tensors(z=z)
        checks.matrices(z, "z")
        form._check(z, "z", tuple(z.shape), given, out)
        matrix = form.parts(z.dtype).matrices[0]
        if matrix.traced is not None:
            shared = form._elementwise(matrix.traced, matrix, z, given)
        else:  # a result is no tensor of the caller's
            pairs = zip(form.results, form.parts(z.dtype).sources, strict=True)
            is_result = any(result.is_stored and source == 0 for result, source in pairs)
            shared = z.clone() if is_result else z
        return form._results({0: shared}, given)

    def parts(self, dtype: torch.dtype) -> Parts:
        """What a call computes for an x of this type."""
        return self._parts[dtype is torch.float32 or dtype is torch.float64]

    def _check(
        self, x: Tensor, first: str, shape: Sequence[int], given: Sequence[Tensor | float], out: object
    ) -> None:
        """What no part checks before another is launched. `shape`: of a matrix; `first`: the name of x."""
        if not is_traced() and _tracing_state() is not None:
            self._refuse_to_be_saved("torch.jit.trace")
        if out is not None:
            raise RuntimeError(
                f"out: got {type(out).__name__}; accepted is None, the results of {self.traced.name} are new tensors"
            )
        for spec, value in zip(self.traced.operands, given, strict=True):
            checks.operand(spec.kind, spec.name, value, x, shape, first)
        for number, result in enumerate(self.results):
            size = shape[-1] if result.axis else math.prod(shape[:-1])
            if result.kind in (AMAX, AMIN) and size == 0:
                what = "columns" if result.axis else "rows"
                raise IndexError(
                    f"{first}: got no {what} for {result.kind}, the result {number} of {self.traced.name}; accepted is "
                    f"a matrix [..., N] with some, not one of shape {list(shape)}"
                )
        if self._reduces_columns and invariance.enabled():
            raise RuntimeError(
                f"batch_invariant: got a call of {self.traced.name}, with a reduction that depends on all rows; "
                "accepted are reductions of each row"
            )

    def _both(
        self, x: Tensor, weight: Tensor, given: Sequence[Any], options: Options
    ) -> dict[int, Tensor] | None:
        """The two matrices that one kernel has computed, by their numbers; None if it is several calls.

        The entry checks the operands that the kernel reads.
        """
        pair, (precision, strict, _) = self.parts(x.dtype).pair, options
        if pair is None or is_traced() or precision not in (None, *ARITHMETIC):
            return None
        epilogue, seen = forms.seen(pair.traced, x, [given[place] for place in pair.places])
        call = LinearCall(
            epilogue, x, weight, seen, precision or DEFAULT, strict=strict, invariant=invariance.enabled()
        )
        found = one_kernel.both(call)
        if not isinstance(found, tuple):
            return None
        return dict(zip((pair.result, pair.stored), found, strict=True))

    def _results(self, found: dict[int, Tensor], given: Sequence[Any]) -> Any:
        """All results, of the matrices that there are: the shared one, or all that have x's dtype."""
        some = next(iter(found.values()))
        parts, matrices = self.parts(some.dtype), self._matrices(found, given)
        if self._are_matrices and len({*parts.sources}) == len(parts.sources):
            return filled(self.traced.results.structure, [matrices[source] for source in parts.sources])
        lead, columns = some.shape[:-1], some.shape[-1]
        flat = (math.prod(lead), columns)
        invariant = invariance.enabled()
        reduced = [
            reductions.reduce(matrices[number].reshape(flat), kind, axis, correction, invariant)
            for number, kind, axis, correction in parts.reductions
        ]
        made: list[Tensor] = []
        for result, source in zip(self.results, parts.sources, strict=True):
            if result.is_stored:
                value = matrices[source]
            else:  # the mean of `var_mean` comes beside its variance
                value, mean = reduced[source]
                value = mean if result.comes_with_var and mean is not None else value
            value = value.float() if result.is_fp32 else value
            # Equal results are tensors of their own, as in PyTorch.
            made.append(value.clone() if any(value is each for each in made) else value)
        shapes = [result.shape(lead, columns) for result in self.results]
        values = [
            value if result.is_stored else unflattened(value, shape)
            for result, value, shape in zip(self.results, made, shapes, strict=True)
        ]
        return filled(self.traced.results.structure, values)

    def _matrices(self, found: dict[int, Tensor], given: Sequence[Any]) -> dict[int, Tensor]:
        """All matrices that are read, by their numbers."""
        dtype = next(iter(found.values())).dtype
        for number, matrix in enumerate(self.parts(dtype).matrices):
            if number in found or matrix.source not in found:
                continue
            z = found[matrix.source]
            made = (
                z.to(compute_dtype(dtype))
                if matrix.traced is None
                else self._elementwise(matrix.traced, matrix, z, given)
            )
            found[number] = made
        return found

    def _elementwise(self, traced: Traced, matrix: Matrix, z: Tensor, given: Sequence[Any]) -> Tensor:
        """A matrix as an elementwise function of another."""
        operands = [given[place] for place in matrix.places]
        if matrix.is_wide:
            kinds = zip(traced.kinds, operands, strict=True)
            operands = [each if kind == SCALAR else each.to(z.dtype) for kind, each in kinds]
        return _route.elementwise(traced, z, operands)
