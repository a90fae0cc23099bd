"""Argument checks: every message names the argument, what was got and what is accepted.

They run before anything is allocated or launched, for calls through the public functions and through
`torch.ops.epigemm.*` alike. What torch reports as RuntimeError (shapes, dtypes, devices) is one here as well.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from epigemm.arguments import overlap
from epigemm.arguments.calls import (
    EIGHT_BITS,
    ElementwiseCall,
    FoldCall,
    LinearCall,
    Vectors,
    operand_dtype,
    tensors_of,
)
from epigemm.arguments.precision import ARITHMETIC, DEFAULT, unknown_precision
from epigemm.compilers import is_traced
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.library import named
from epigemm.epilogues.registry import EPILOGUES, FOLDED, Epilogue, compute_dtype, dtype_of

DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_STRIDED = torch.strided
_LEAST_EPS = torch.finfo(torch.float32).tiny


def epilogue_named(name: str, *, linear: bool) -> Epilogue:
    """The registered epilogue called `name`; ValueError if there is none, or if `linear` and it has no linear form."""
    epilogue = named(name)
    if epilogue is None or (linear and not epilogue.linear):
        accepted = ", ".join(repr(e.name) for e in EPILOGUES.values() if e.linear or not linear)
        raise ValueError(f"epilogue: got {name!r}; accepted are {accepted}")
    return epilogue


def arguments(call: LinearCall | ElementwiseCall) -> None:
    """Check the arguments of a call, of which x and the weight are tensors."""
    x, out = call.x, call.out
    if not isinstance(call, LinearCall):
        first = call.epilogue.first
        _require_matrix_like(first, x)
        if call.epilogue.is_choice or any(each.dim() for each in tensors_of(call.operands)):
            rows_of_vectors(x, first)
        _require_operands(call, x.shape[-1] if x.dim() else 1, first)
        if out is not None:
            require_out(out, x.shape, x, first)
        return
    if call.group_ends is not None:
        groups(x, call.weight, call.group_ends)
    elif call.eight_bits is None:
        (batches if call.weight.dim() == 3 else product)(x, call.weight)
    else:
        shapes(x, call.weight)
    columns = call.weight.shape[-2]
    _require_operands(call, columns, "x")
    if call.eight_bits is None and call.precision != DEFAULT and call.precision not in ARITHMETIC:
        raise unknown_precision(call.precision)
    if out is not None:
        dtype = None if call.eight_bits is None else call.dtype
        require_out(out, (*x.shape[:-1], columns), x, "x", dtype)


def product(x: Tensor, weight: Tensor) -> None:
    """RuntimeError unless x and weight have a product."""
    if x.dtype in EIGHT_BITS:
        raise RuntimeError(
            f"x_scale: got None with an x of {x.dtype}; accepted are float32 tensors as x_scale and weight_scale "
            "(rows in groups and functions with several results take no 8 bits)"
        )
    _require_matrix_like("x", x)
    require_like("weight", weight, x.dtype, x)
    shapes(x, weight)


def shapes(x: Tensor, weight: Tensor) -> None:
    """RuntimeError unless x and weight have shapes of factors."""
    shape = weight.shape
    if len(shape) != 2:
        raise RuntimeError(
            f"weight: got shape {_shape(weight)}; accepted is [out_features, in_features] (2 dimensions)"
        )
    if x.dim() == 0 or x.shape[-1] != shape[1]:
        raise RuntimeError(
            f"x: got shape {_shape(x)}; accepted is [..., in_features] with in_features = {shape[1]}, "
            f"as weight has shape {_shape(weight)}"
        )


def batches(x: Tensor, weight: Tensor) -> None:
    """RuntimeError unless x and a weight of three dimensions have products, a matrix each."""
    _require_matrix_like("x", x)
    require_like("weight", weight, x.dtype, x)
    if x.dim() != 3 or x.shape[0] != weight.shape[0] or x.shape[2] != weight.shape[2]:
        raise RuntimeError(
            f"x: got shape {_shape(x)}; accepted is [{weight.shape[0]}, rows, {weight.shape[2]}], as weight has shape "
            f"{_shape(weight)}: a matrix for each of its matrices"
        )


def groups(x: Tensor, weight: Tensor, offs: Tensor) -> None:
    """RuntimeError unless x, the groups' weights and the groups' ends fit each other.

    What `offs` holds is not looked at: that would wait for the GPU.
    """
    _require_matrix_like("x", x)
    require_like("weight", weight, x.dtype, x)
    if weight.dim() != 3 or not weight.shape[0]:
        raise RuntimeError(
            f"weight: got shape {_shape(weight)}; accepted is [groups, out_features, in_features] with at least one "
            "group"
        )
    if x.dim() != 2 or x.shape[1] != weight.shape[2]:
        raise RuntimeError(
            f"x: got shape {_shape(x)}; accepted is [rows, in_features] with in_features = {weight.shape[2]}, as "
            f"weight has shape {_shape(weight)}"
        )
    require_like("offs", offs, torch.int32, x)
    if offs.dim() != 1 or offs.shape[0] != weight.shape[0] or not offs.is_contiguous():
        raise RuntimeError(
            f"offs: got shape {_shape(offs)} and strides {tuple(offs.stride())}; accepted is [{weight.shape[0]}], "
            "contiguous: the first row after each group"
        )


def fold_batch_norm(like: Tensor, vectors: Vectors, eps: float, columns: int | None) -> FoldCall:
    """The fold of the vectors of `FOLDED`, checked; `columns`: their length, None for that of the first."""
    check_eps(eps)
    _require_matrix_like("like", like)
    dtype, device = like.dtype, like.device
    compute = compute_dtype(dtype)
    for name, vector in zip(FOLDED, vectors, strict=True):
        # As in require_like, for both dtypes and the length.
        if vector is None or (
            (vector.dtype is dtype or vector.dtype is compute)
            and vector.device == device
            and vector.layout is _STRIDED
            and not vector.is_nested
            and vector.shape == (columns,)
        ):
            continue
        strided(name, vector)
        if vector.dtype != compute and (compute == torch.float64 or vector.dtype != like.dtype):
            accepted = _names({like.dtype, compute})
            raise RuntimeError(
                f"{name}: got dtype {vector.dtype}; accepted is {accepted}, as x has {like.dtype}"
            )
        require_device(name, vector, like)
        if columns is None and vector.dim() == 1:
            columns = vector.shape[0]
        require_length(name, vector, columns)
    if columns is None:
        raise ValueError(f"{', '.join(FOLDED)}: got None for all; at least one vector is needed")
    return FoldCall(like, columns, vectors, eps)


def is_folded(running_var: Tensor | None, eps: float) -> bool:
    """Whether a BatchNorm may be folded: the fold multiplies infinities where a variance of 0 and `eps` round to 0."""
    return running_var is None or not isinstance(eps, (int, float)) or not 0 <= eps < _LEAST_EPS


def check_eps(eps: float) -> None:
    """TypeError unless `eps` is a real number, ValueError unless it is finite and not negative."""
    if type(eps) is not float:
        number("eps", eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps: got {eps!r}; accepted is a finite number >= 0")


def running_statistics(running_mean: Tensor | None, running_var: Tensor | None) -> None:
    """ValueError where inference BatchNorm is asked for without its statistics, TypeError for what is no tensor."""
    for name, vector in (("running_mean", running_mean), ("running_var", running_var)):
        if vector is None:
            raise ValueError(
                f"{name}: got None; inference BatchNorm accepts a tensor of shape [N]. With batch statistics use "
                "epigemm.linear_scale followed by torch.nn.functional.batch_norm."
            )
        tensors(**{name: vector})


def tensors(**arguments: object) -> None:
    """TypeError unless each argument is a tensor, RuntimeError for a nested one."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {_kind(value)}; accepted is a torch.Tensor")
        if value.is_nested:  # which has no shape to be looked at
            strided(name, value)


def optional_tensors(**arguments: object) -> None:
    """As `tensors`, of arguments that may be None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {_kind(value)}; accepted is a torch.Tensor or None")
        if value is not None and value.is_nested:
            strided(name, value)


def strided(name: str, tensor: Tensor) -> None:
    """RuntimeError unless a dense tensor."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise RuntimeError(f"{name}: got {kind}; accepted is a dense (torch.strided) tensor")


def matrices(x: Tensor, name: str) -> None:
    """RuntimeError unless x, called `name`, is a dense tensor of rows, of a dtype that there are kernels for."""
    _require_matrix_like(name, x)
    rows_of_vectors(x, name)


def rows_of_vectors(x: Tensor, name: str = "x") -> None:
    """RuntimeError unless x has a last dimension for per-column vectors to lie along."""
    if x.dim() == 0:
        raise RuntimeError(
            f"{name}: got a 0-dimensional tensor; accepted are shapes [..., N], for there are vectors of length N"
        )


def precision(value: object) -> str:
    """A caller's `precision`; TypeError unless a string, ValueError unless one of the accepted."""
    if not isinstance(value, str):
        raise TypeError(f"precision: got {_kind(value)}; accepted is a string or None")
    if value not in ARITHMETIC:
        raise unknown_precision(value)
    return value


def flag(name: str, value: object) -> bool:
    """A caller's switch; TypeError unless True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {_kind(value)}; accepted is True or False")
    return value


def number(name: str, value: object, accepted: str = "a number") -> None:
    """TypeError unless `value` is a real number."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: got {_kind(value)}; accepted is {accepted}")


def scalar_number(name: str, value: object) -> float:
    """A Python number as a float; TypeError otherwise, ValueError for one that no float holds."""
    number(name, value, "a number or a 0-dimensional tensor")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(
            f"{name}: got a number beyond fp64; accepted is one of at most {sys.float_info.max:.4g}"
        ) from None


def scalar_tensor(name: str, value: Tensor, x: Tensor, first: str = "x") -> None:
    """RuntimeError unless `value` is a floating 0-dimensional tensor beside x."""
    strided(name, value)
    if value.dim() != 0:
        raise RuntimeError(
            f"{name}: got shape {_shape(value)}; accepted is a number or a 0-dimensional tensor"
        )
    if value.dtype not in DTYPES:
        raise RuntimeError(f"{name}: got dtype {value.dtype}; accepted are {_names(DTYPES)}")
    require_device(name, value, x, first)


def not_negated(out: Tensor) -> None:
    """RuntimeError for an `out` whose memory holds the negative of its values.

    Not where Dynamo traces, which breaks its graph there: the operator that it traces asks again.
    """
    if not is_traced() and out.is_neg():
        raise RuntimeError(
            "out: got a lazily negated view; accepted is a tensor whose memory holds its own values"
        )


def operand(kind: str, name: str, value: object, x: Tensor, shape: Sequence[int], first: str = "x") -> None:
    """TypeError or RuntimeError unless `value` is an operand of this kind, as a caller gives it beside a matrix.

    `shape`: of the matrix; `first`: what the caller calls x.
    """
    if kind == SCALAR and not isinstance(value, Tensor):
        scalar_number(name, value)
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {_kind(value)}; accepted is {KINDS[kind].accepted}")
    if kind == SCALAR:
        scalar_tensor(name, value, x, first)
        return
    wide, about = compute_dtype(x.dtype), KINDS[kind]
    require_like(name, value, wide if value.dtype is wide else x.dtype, x, first, is_choice=True)
    lead, columns = shape[:-1], shape[-1]
    given = (*value.shape, 1) if about.lacks_last_axis else value.shape
    if not about.fits(given, lead, columns):
        raise RuntimeError(f"{name}: got shape {_shape(value)}; accepted is {_accepted(kind, lead, columns)}")


def output_overlap(
    out: Tensor, x: Tensor, others: Iterable[tuple[str, Tensor | None]], *, in_place: bool, first: str = "x"
) -> bool:
    """Whether `out` may share memory with an input, so that the result has to be computed elsewhere and copied.

    `others`: by name; an operand may have any, also that of another input.
    RuntimeError if it does for certain, or if it may overlap itself: a kernel's writes and reads would race.
    """
    if out.is_meta:
        return False
    inputs = [(name, other) for name, other in others if other is not None]
    if not (in_place and overlap.is_same_view(out, x)):
        inputs.insert(0, (first, x))
    for name, other in inputs:
        if overlap.shares(out, other):
            accepted = "memory of its own"
            if other is x:
                accepted = f"{f'{first} itself or ' if in_place else ''}memory that {first} does not use"
            raise RuntimeError(f"out: some of its elements share memory with {name}; accepted is {accepted}")
    if overlap.meets_itself(out):
        raise RuntimeError(
            f"out: several indices may address the same element (shape {_shape(out)}, strides {tuple(out.stride())}); "
            "accepted is a tensor without internal overlap"
        )
    return any(overlap.may_share(out, other) for _, other in inputs)


def own_memory(
    out: object, x: object, others: Iterable[tuple[str, object]], *, in_place: bool = False, first: str = "x"
) -> None:
    """`output_overlap` of a call whose last step writes `out`, and no longer sees the caller's arguments."""
    if out is None or is_traced():
        return
    seen = [(name, each) for name, each in others if has_memory(each)]
    if has_memory(out) and has_memory(x):
        output_overlap(out, x, seen, in_place=in_place, first=first)  # type: ignore[arg-type]


def has_memory(tensor: object) -> bool:
    """Whether a tensor of its own, none that stands for others or is made of some."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)
    )


def _require_operands(call: LinearCall | ElementwiseCall, columns: int, first: str) -> None:
    epilogue, x, operands, dtype = call.epilogue, call.x, call.operands, call.x.dtype
    if isinstance(call, LinearCall) and call.eight_bits is not None:
        dtype = operand_dtype(call.eight_bits)
    if len(operands) != len(epilogue.operands):
        raise operands_that_do_not_fit(epilogue, operands)
    for place, (operand, value) in enumerate(zip(epilogue.operands, operands, strict=True), 1):
        if not isinstance(value, Tensor):
            if place == epilogue.bias_place:
                optional_tensors(**{operand.name: value})
                continue
            if value is None or operand.kind != SCALAR:
                raise operands_that_do_not_fit(epilogue, operands)
            continue
        require_like(
            operand.name, value, dtype_of(operand, dtype), x, first, is_choice=epilogue.is_choice, of=dtype
        )
        kind = KINDS[operand.kind]
        lead = x.shape[:-1]
        if isinstance(call, LinearCall) and call.weight.dim() == 3 and kind.is_of_columns:
            require_vectors(operand.name, value, call.weight)
            continue
        is_shared = operand.shared and kind.shares_rows(value.shape, lead, columns)
        if tuple(value.shape) != kind.shape(lead, columns) and not is_shared:
            accepted = _accepted(operand.kind, lead, columns)
            got = _shape(value)[:-1] if kind.lacks_last_axis else _shape(value)
            if operand.kind == SCALAR:
                accepted = "a 0-dimensional tensor"
            raise RuntimeError(f"{operand.name}: got shape {got}; accepted is {accepted}")


def operands_that_do_not_fit(epilogue: Epilogue, operands: Sequence[Tensor | float | None]) -> RuntimeError:
    """The error of a call with other operands than its epilogue has."""
    tensors = len(tensors_of(operands))
    numbers = sum(each is not None for each in operands) - tensors
    return RuntimeError(
        f"operands, scalars: got {tensors} tensors and {numbers} numbers; the epilogue {epilogue.name!r} accepts "
        f"{[operand.name for operand in epilogue.operands]} (a scalar as a 0-d tensor or as a number)"
    )


def _accepted(kind: str, lead: Sequence[int], columns: int) -> str:
    """The shapes of an operand beside a result, for a message."""
    return " or ".join(f"{list(shape)}" for shape in KINDS[kind].shapes(lead, columns))


def require_out(
    out: Tensor, shape: Sequence[int], x: Tensor, first: str, dtype: torch.dtype | None = None
) -> None:
    """RuntimeError unless `out` receives a result of this shape; `dtype`: of the result, if it is not x's."""
    require_like("out", out, dtype or x.dtype, x, first, of=dtype)
    if out.shape != tuple(shape):
        raise RuntimeError(f"out: got shape {_shape(out)}; accepted is {list(shape)}")
    not_negated(out)


def _require_matrix_like(name: str, x: Tensor) -> None:
    strided(name, x)
    if x.dtype not in DTYPES:
        raise RuntimeError(f"{name}: got dtype {x.dtype}; accepted are {_names(DTYPES)}")


def require_like(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    x: Tensor,
    first: str = "x",
    *,
    is_choice: bool = False,
    of: torch.dtype | None = None,  # the result's, if it is not x's
) -> None:
    """RuntimeError unless dense, of this type and on the device of x, which the caller calls `first`."""
    # One expression tests whether everything fits. Only if it fails, the code below finds out what is wrong.
    if (
        tensor.dtype == dtype
        and tensor.device == x.device
        and tensor.layout is _STRIDED
        and not tensor.is_nested
    ):
        return
    strided(name, tensor)
    if tensor.dtype != dtype:
        is_other = of is not None and of is not x.dtype
        like = of if is_other and of is not None else x.dtype
        accepted = _names({like, compute_dtype(like)} if is_choice else {dtype})
        why = f", as {'the result' if is_other else first} has {like}" if is_choice or dtype == like else ""
        raise RuntimeError(f"{name}: got dtype {tensor.dtype}; accepted is {accepted}{why}")
    require_device(name, tensor, x, first)


def require_device(name: str, tensor: Tensor, x: Tensor, first: str = "x") -> None:
    """RuntimeError unless on the device of x, which the caller calls `first`."""
    if tensor.device != x.device:
        raise RuntimeError(f"{name}: got device {tensor.device}; accepted is {x.device}, where {first} is")


def require_vectors(name: str, vectors: Tensor, weight: Tensor) -> None:
    """RuntimeError unless a vector for each group, with a number for each row of its weight."""
    if vectors.shape != weight.shape[:2]:
        raise RuntimeError(
            f"{name}: got shape {_shape(vectors)}; accepted is {[*weight.shape[:2]]}, a vector for each group"
        )


def require_length(name: str, vector: Tensor, columns: int | None) -> None:
    """RuntimeError unless a vector of this length; None: there is none that would fit."""
    if vector.dim() != 1 or vector.shape[0] != columns:
        raise RuntimeError(
            f"{name}: got shape {_shape(vector)}; accepted is [{'N' if columns is None else columns}]"
        )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _names(dtypes: frozenset[torch.dtype] | set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype) for dtype in dtypes))
