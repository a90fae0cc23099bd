"""A Python function as the epilogue of a linear layer: what `epigemm.epilogue` makes of one with one result."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from epigemm import route as _route
from epigemm.arguments import checks
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import entry, stores
from epigemm.calls.layouts import unflattened
from epigemm.compilers import at_trace_time, is_traced
from epigemm.decorated import Decorated, absent
from epigemm.epilogues.declaring import OperandSpec, Traced
from epigemm.epilogues.kinds import KINDS, MATRIX, PER_COLUMN, SCALAR
from epigemm.epilogues.registry import BIAS, BIAS_RELU, Epilogue, compute_dtype
from epigemm.epilogues.traced import LinkedEpilogue
from epigemm.epilogues.tracing.program import REAL, Program, Ref, Step
from epigemm.epilogues.tracing.source import functor_text
from epigemm.operators import compiled
from epigemm.packs import weight_packs
from epigemm.packs.weight_packs import PackedWeight
from epigemm.planning.reasons import Reason

_Given = TypeVar("_Given", bound=Tensor | float)
_Choice = tuple[bool, ...]  # for each operand
_tracing_state = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled


class UserEpilogue(Decorated):
    """A user's function as the epilogue of a linear layer; made by `epigemm.epilogue`."""

    traced: Traced
    without: dict[tuple[int, ...], UserEpilogue]

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced)
        self._key = str(next(_keys))  # not a number, because Dynamo makes a symbol of the second one
        _made[self._key] = self
        self._linked: dict[_Choice, LinkedEpilogue] = {}
        # If an operand is None, the epilogue is another one, of the remaining operands.
        self.without = {missing: UserEpilogue(each) for missing, each in traced.without.items()}
        # If the function is one of epigemm's own, with a bias or a bias and a ReLU. For those the planner knows that
        # PyTorch's GEMM may add them.
        self.copied = _built_in(self.traced)
        self._are_scalars = tuple(operand.kind == SCALAR for operand in self.traced.operands)
        self._are_matrices = tuple(kind == MATRIX for kind in self.traced.kinds)
        self._reads_matrix = True in self._are_matrices
        self._lack_last_axis = [KINDS[kind].lacks_last_axis for kind in self.traced.kinds]
        differentiable = self.traced.program.with_gradient()
        # For the product and each operand, whether its gradient ends inside the function. PyTorch does not record such
        # tensors.
        self._ends = tuple(number not in differentiable for number in range(1 + len(self.traced.operands)))
        bias = self.traced.program.bias()
        has_bias = bias is not None and self.traced.kinds[bias - 1] == PER_COLUMN
        self._bias = bias - 1 if has_bias and bias is not None else None  # its place among the operands
        # The places of the operands whose type the result's is promoted from. The bias has the product's.
        self._typing = [number - 1 for number in self.traced.program.typing() - {0, bias if has_bias else 0}]
        self._usual = self.linked(self._are_scalars)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
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
            RuntimeError: a shape, dtype, device or layout that does not fit; `strict`, and no fused kernel would run; a
                number that the function has captured has changed.
            NotImplementedError: under `torch.export` or `torch.jit.trace`.

        Example:
            >>> y = swish_clamp(x, weight, bias, residual, limit=0.5)
        """
        return self.call(x, weight, operands, named, out, precision, strict, None)

    def call(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        operands: Sequence[Tensor | float | None],
        named: Mapping[str, Tensor | float | None],
        out: Tensor | None,
        precision: str | None,
        strict: bool,
        pack_use: str | None,
    ) -> Tensor:
        """Like calling it; `pack_use`: what the call may do with the weight's pack, as of `epigemm.route.linear`."""
        if _any_autocast():
            given = self._in_order(operands, named)
            form = self.without[missing] if self.without and (missing := absent(given)) else self
            given = [each for each in given if each is not None]
            if out is not None:
                named = dict(zip((spec.name for spec in form.traced.operands), given, strict=True))
                checks.own_memory(out, x, {"weight": weight, **named})
            if _route.promotes(x, [given[place] for place in form._typing]):
                z, operands = form.promoted(x, weight, given, precision, strict, pack_use)
                return form.elementwise(z, *operands, out=out)
        return self.call_in_x_dtype(x, weight, operands, named, out, precision, strict, pack_use)

    def call_in_x_dtype(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        operands: Sequence[Tensor | float | None],
        named: Mapping[str, Tensor | float | None],
        out: Tensor | None,
        precision: str | None,
        strict: bool,
        pack_use: str | None,
    ) -> Tensor:
        """As `call`, but under autocast too the result has the product's type, whatever the operands have."""
        given = self._in_order(operands, named)
        if self.without and (missing := absent(given)):
            other, rest = self.without[missing], [each for each in given if each is not None]
            return other.call_in_x_dtype(x, weight, rest, {}, out, precision, strict, pack_use)
        why_not: Reason | None = None
        if isinstance(weight, PackedWeight):
            weight, pack_use = weight.weight, weight_packs.KEEP
        if True in self._ends:
            given = self._unrecorded(given)
            if self._ends[0]:
                x, weight = _detached(x), _detached(weight)
        if self.copied is None and not is_traced():
            epilogue, seen = self.seen(x, given)
            found = entry.linear(epilogue, x, weight, seen, None, precision, out, pack_use, strict)
            if isinstance(found, Tensor):
                return found
            why_not = found
        checks.tensors(x=x, weight=weight)
        checks.optional_tensors(out=out)
        if self.copied is not None and (bias := _as_bias(given[0], x, weight)) is not None:
            return _route.linear(self.copied, x, weight, bias, None, precision, out, strict, pack_use)
        x, weight, given = self._autocast(x, weight, given)
        checks.product(x, weight)  # checked before the operands, whose shapes depend on it
        lead, columns = x.shape[:-1], weight.shape[0]
        epilogue, tensors, numbers, is_flat = self._arguments(x, given, (*lead, columns), "x")
        matrix = x if is_flat else x.reshape(math.prod(lead), x.shape[-1])
        target = out if is_flat or out is None else _flat_out(out, (*lead, columns))
        flat = LinearCall(epilogue, matrix, weight, None, tensors, numbers, strict=strict, out=target)
        result = _route.linear_linked(flat, precision, pack_use, why_not)
        return result if is_flat else out if out is not None else unflattened(result, (*lead, columns))

    def elementwise(
        self,
        z: Tensor,
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
        given = self._in_order(operands, named)
        if self.without and (missing := absent(given)):
            return self.without[missing].elementwise(
                z, *(each for each in given if each is not None), out=out
            )
        why_not: Reason | None = None
        if True in self._ends:
            given = self._unrecorded(given)
            z = _detached(z) if self._ends[0] else z
        if not is_traced():
            epilogue, seen = self.seen(z, given)
            found = entry.elementwise(epilogue, z, seen, None, out)
            if isinstance(found, Tensor):
                return found
            why_not = found
        checks.tensors(z=z)
        checks.optional_tensors(out=out)
        checks.matrices(z, "z")
        epilogue, tensors, numbers, is_flat = self._arguments(z, given, tuple(z.shape), "z")
        matrix = z if is_flat else z.reshape(math.prod(z.shape[:-1]), z.shape[-1])
        target = out if is_flat or out is None else _flat_out(out, tuple(z.shape))
        if not is_flat and target is not None and target.data_ptr() == z.data_ptr():
            matrix = target  # in place: the same matrix
        flat = ElementwiseCall(epilogue, matrix, None, tensors, numbers, target)
        result = _route.elementwise_linked(flat, why_not)
        return result if is_flat else out if out is not None else unflattened(result, z.shape)

    def runs_built_in(self, operands: Sequence[Tensor], x: Tensor) -> bool:
        """Whether a linear call with operands of these types is one of epigemm's own functions, on its kernels."""
        return self.copied is not None and operands[0].dtype is x.dtype

    @property
    def keeps_gradients(self) -> bool:
        """Whether the product and every operand has a gradient where the result has one."""
        return True not in self._ends

    def of_linear(self, x: Tensor, given: Sequence[Any]) -> Epilogue:
        """The epilogue of a linear call with operands of these types."""
        if self.copied is not None and self.runs_built_in(given, x):
            return self.copied
        return self.of_types(x, given)

    def linked(self, folded: Sequence[bool], shared: Sequence[bool] = ()) -> LinkedEpilogue:
        """The epilogue for operands of these types: for each whether it has the arithmetic's type, not x's.

        `shared`: for each whether it is a matrix that shares rows; empty if none does.
        """
        key = (*folded, *shared)
        found = self._linked.get(key)
        if found is None:
            found = self._linked[key] = LinkedEpilogue(self.traced, folded, shared)
        return found

    def _unrecorded(self, given: Sequence[Tensor | float]) -> list[Tensor | float]:
        """The operands, detached if their gradient ends inside the function."""
        pairs = zip(given, self._ends[1:], strict=True)
        return [_detached(value) if ends else value for value, ends in pairs]

    def _autocast(
        self, x: Tensor, weight: Tensor, given: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Sequence[Any]]:
        of_bias = None if self._bias is None else given[self._bias]
        x, weight, biases = _route.autocast(x, weight, of_bias if isinstance(of_bias, Tensor) else None)
        if self._bias is not None and biases[0] is not None:
            # The bias has the product's type, like a linear layer's, and is added before the product is rounded.
            given = [*given[: self._bias], biases[0], *given[self._bias + 1 :]]
        return x, weight, given

    def plain_call(
        self, x: Tensor, weight: Tensor, given: Sequence[Any], *, strict: bool
    ) -> tuple[LinearCall, entry.Vectors]:
        """A linear call that autocast alone may intercept, and its operands in the form of the entry."""
        x, weight, given = self._autocast(x, weight, given)
        if self.copied is not None and (bias := _as_bias(given[0], x, weight)) is not None:
            return LinearCall(self.copied, x, weight, bias, strict=strict), (bias,)
        epilogue, seen = self.seen(x, given)
        return stores.of_entry(LinearCall(epilogue, x, weight, strict=strict), epilogue, seen), seen

    def of_types(self, x: Tensor, given: Sequence[Tensor | float]) -> LinkedEpilogue:
        """The epilogue for the element types of a call's tensors."""
        dtype = getattr(x, "dtype", None)
        shared = self._shared(x, given) if self._reads_matrix else ()
        if dtype is torch.float32 or dtype is torch.float64:
            return self._usual if not shared else self._epilogue(self._are_scalars, shared)
        dtypes = [getattr(value, "dtype", None) for value in given]
        folded = zip(self._are_scalars, dtypes, strict=True)
        return self._epilogue(tuple(each or of is torch.float32 for each, of in folded), shared)

    def seen(
        self, x: Tensor, given: Sequence[Tensor | float]
    ) -> tuple[LinkedEpilogue, tuple[Tensor | float, ...]]:
        """The epilogue and its operands in the form of the entry, which checks them."""
        epilogue = self.of_types(x, given)
        if not any(self._lack_last_axis):
            return epilogue, tuple(given)
        pairs = zip(given, self._lack_last_axis, strict=True)
        return epilogue, tuple(
            value.unsqueeze(-1) if lacks and isinstance(value, Tensor) else value for value, lacks in pairs
        )

    def _shared(self, x: Tensor, given: Sequence[Tensor | float]) -> _Choice:
        """For each operand whether it is a matrix that shares rows; empty if none does."""
        shared = []
        for value, is_matrix in zip(given, self._are_matrices, strict=True):
            if is_matrix and _shares_rows(value, x):  # a comparison of sizes, for Dynamo no constant
                shared.append(True)
            else:
                shared.append(False)
        return tuple(shared) if True in shared else ()

    def _arguments(
        self, x: Tensor, given: Sequence[Tensor | float], shape: Sequence[int], first: str
    ) -> tuple[LinkedEpilogue, list[Tensor], list[float], bool]:
        """The epilogue for these operands' types, and the operands in the form of the operators.

        The last result says whether x stays as it is: a matrix, or beside a matrix that shares rows, which needs x's
        leading axes. Else x becomes a matrix.
        """
        if not is_traced() and _tracing_state() is not None:
            self._refuse_to_be_saved("torch.jit.trace")
        wide = compute_dtype(x.dtype)
        shared = self._shared(x, given)
        is_flat = x.dim() == 2 or bool(shared)
        tensors, numbers, folded = [], [], []
        # The operators accept all scalars as numbers, or all as tensors.
        has_tensors = any(_is_tensor(v) for v, s in self._pairs(given) if s.kind == SCALAR)
        for value, spec in self._pairs(given):
            if spec.kind == SCALAR:
                folded.append(True)
                if isinstance(value, Tensor):
                    checks.scalar_tensor(spec.name, value, x, first)
                    tensors.append(value.to(wide))
                elif has_tensors:
                    tensors.append(compiled.on_device(checks.scalar_number(spec.name, value), x).to(wide))
                else:
                    numbers.append(checks.scalar_number(spec.name, value))
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{spec.name}: got {type(value).__name__}; accepted is {KINDS[spec.kind].accepted}"
                )
            checks.strided(spec.name, value)
            folded.append(value.dtype is wide and x.dtype is not wide)
            flat = _flat(spec, value, shape)
            if is_flat and flat.dim() != len(shape) and KINDS[spec.kind].by_row:
                flat = flat.reshape(*value.shape[: len(shape) - 1], flat.shape[-1])
            tensors.append(flat)
        return self._epilogue(tuple(folded), shared), tensors, numbers, is_flat

    def _refuse_to_be_saved(self, under: str) -> None:
        if not self.traced.is_own:
            super()._refuse_to_be_saved(under)

    def _pairs(self, given: Sequence[Tensor | float]) -> list[tuple[Tensor | float, OperandSpec]]:
        return list(zip(given, self.traced.operands, strict=True))

    def _epilogue(self, folded: _Choice, shared: _Choice) -> LinkedEpilogue:
        if not is_traced():
            return self.linked(folded, shared)
        _make(self._key, folded, shared)  # not traced by Dynamo, which then finds the result
        return self._linked[folded + shared]


_keys = itertools.count()
_made: weakref.WeakValueDictionary[str, UserEpilogue] = weakref.WeakValueDictionary()


@at_trace_time
def _make(key: str, folded: _Choice, shared: _Choice) -> None:
    _made[key].linked(folded, shared)


def _built_in(traced: Traced) -> Epilogue | None:
    """The built-in epilogue that a function equals, if there is one: acc + bias, or its ReLU."""
    if traced.kinds != (PER_COLUMN,):
        return None
    for summands in ((0, 1), (1, 0)):
        added = Step("add", tuple(Ref(number) for number in summands), REAL, "")
        relu = Step("relu", (Ref(2),), REAL, "")
        for epilogue, steps in ((BIAS, (added,)), (BIAS_RELU, (added, relu))):
            program = Program(1, steps, Ref(1 + len(steps)))
            if functor_text(program, traced.kinds) == traced.source:
                return epilogue
    return None


def _detached(value: _Given) -> _Given:
    return _route.detached(value) if isinstance(value, Tensor) else value  # type: ignore[return-value]


def _as_bias(value: Tensor | float, x: Tensor, weight: Tensor) -> Tensor | None:
    """An operand, if it can be the bias of a built-in epilogue."""
    fits = isinstance(value, Tensor) and value.dtype is x.dtype and value.shape == weight.shape[:1]
    return value if fits else None  # type: ignore[return-value]


def _is_tensor(scalar: Tensor | float) -> bool:
    """Whether a scalar is a tensor, or should become one because each value of a number would be traced again."""
    return isinstance(scalar, Tensor) or compiled.is_symbol(scalar)


def _shares_rows(value: object, x: object) -> bool:
    """Whether a matrix has 1 in place of the last leading axes of x."""
    if not isinstance(value, Tensor) or not isinstance(x, Tensor) or value.is_nested or x.is_nested:
        return False  # a nested tensor has no shape
    shape = value.shape
    return len(shape) > 1 and shape[-2] == 1 and KINDS[MATRIX].shares_rows(shape, x.shape[:-1], shape[-1])


def _flat(spec: OperandSpec, value: Tensor, shape: Sequence[int]) -> Tensor:
    """An operand in its form for a result `[M, N]`; the checks refuse a vector that does not fit."""
    kind = KINDS[spec.kind]
    if not kind.by_row:
        return value
    checks.shape_of_operand(spec.kind, spec.name, value, shape)
    if value.dim() != 2 or kind.lacks_last_axis:
        lead = value.shape[: len(shape) - 1]
        value = value.reshape(kind.shape((math.prod(lead),), shape[-1]))
    # Kernels read it by rows. A matrix with another layout, such as a transposed one, is copied. So is an empty one,
    # which for torch is contiguous whatever its strides are.
    is_by_rows = value.shape[1] <= 1 or value.stride(1) == 1
    return value if is_by_rows else value.clone(memory_format=torch.contiguous_format)


def _flat_out(out: Tensor, shape: Sequence[int]) -> Tensor:
    """`out` as a matrix, without a copy."""
    if tuple(out.shape) != tuple(shape):
        raise RuntimeError(f"out: got shape {list(out.shape)}; accepted is {list(shape)}")
    try:
        return out.view(math.prod(shape[:-1]), shape[-1])
    except RuntimeError:
        raise RuntimeError(
            f"out: got strides {tuple(out.stride())}; accepted is a tensor whose leading dimensions are one stride "
            "apart"
        ) from None
