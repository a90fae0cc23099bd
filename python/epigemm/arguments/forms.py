"""The epilogue of a function for the types of a call's operands, and the operands as calls have them.

A matrix or vector may have x's type, or the arithmetic's beside an x of 16 bits; a matrix may have a row for several of
x's. Each such choice is an epilogue of its own, which is registered when it is first met.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.compilers import at_trace_time, is_traced
from epigemm.epilogues.declaration import TRACED, Traced
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.registry import Epilogue, Operands, compute_dtype, typed

Function = Epilogue | Traced
"""What a call computes: an epilogue whose operands' types are fixed, or a function of which they choose one."""
_Choice = tuple[bool, ...]  # for each operand
_WIDE = (torch.float32, torch.float64)


def of_types(function: Function, x: Tensor, operands: Operands, dtype: torch.dtype | None = None) -> Epilogue:
    """The epilogue for the element types of a call's tensors, and for matrices that share rows.

    `dtype`: of the result, if it is not x's.
    """
    if isinstance(function, Epilogue):
        return function
    shared: _Choice = ()
    for place in function.matrices:
        if _shares_rows(operands[place], x):  # a comparison of sizes, for Dynamo no constant
            shared = shared or (False,) * len(operands)
            shared = (*shared[:place], True, *shared[place + 1 :])
    folded: _Choice = function.are_scalars
    if (dtype or getattr(x, "dtype", None)) not in _WIDE:
        pairs = zip(function.are_scalars, operands, strict=True)
        folded = tuple([each or getattr(value, "dtype", None) is torch.float32 for each, value in pairs])
    if not is_traced():
        found: Epilogue = function.forms.get(folded + shared) or typed(function, folded, shared)
        return found
    _make(function.key, folded, shared)  # not traced by Dynamo, which then finds the result
    made: Epilogue = function.forms[folded + shared]
    return made


def seen(
    function: Function, x: Tensor, operands: Operands, dtype: torch.dtype | None = None
) -> tuple[Epilogue, Operands]:
    """The epilogue of a call, and its operands in the form of the entry: of rows with a last axis of 1."""
    epilogue = of_types(function, x, operands, dtype)
    if isinstance(function, Epilogue) or not function.has_rows:
        return epilogue, tuple(operands)
    pairs = zip(operands, function.kinds, strict=True)
    return epilogue, tuple(
        [
            value.unsqueeze(-1) if isinstance(value, Tensor) and KINDS[kind].lacks_last_axis else value
            for value, kind in pairs
        ]
    )


def converted(
    function: Function,
    x: Tensor,
    operands: Operands,
    first: str = "x",
    dtype: torch.dtype | None = None,
) -> tuple[Epilogue, Operands]:
    """The epilogue of a call that the entry has not made, and its operands as calls have them.

    `dtype`: of the result, if it is not x's. Shapes and types are checked by whoever makes the call.
    """
    wide = compute_dtype(dtype or x.dtype)
    given: list[Any] = []
    # The operators accept all scalars as numbers, or all as tensors. Each value of a symbol would be traced again.
    pairs = [*zip(function.operands, operands, strict=True)]
    has_tensors = any(isinstance(v, Tensor) or _is_symbol(v) for spec, v in pairs if spec.kind == SCALAR)
    for place, (spec, value) in enumerate(pairs, 1):
        if spec.kind == SCALAR and isinstance(value, Tensor):
            checks.scalar_tensor(spec.name, value, x, first)
            value = value.to(wide)
        elif spec.kind == SCALAR:
            number = value if _is_symbol(value) else checks.scalar_number(spec.name, value)
            value = _on_device(number, x).to(wide) if has_tensors else number
        elif not isinstance(value, Tensor) and (value is not None or place != function.bias_place):
            got = type(value).__name__
            raise TypeError(f"{spec.name}: got {got}; accepted is {KINDS[spec.kind].accepted}")
        given.append(value)
    return seen(function, x, tuple(given), dtype)


def without_symbols(function: Function, operands: Operands, x: Tensor) -> Operands:
    """The operands of a trace, with 0-d tensors in place of numbers that are symbols.

    The operators take numbers as constants, so their graph would be compiled again for each value.
    """
    if not function.has_scalar:
        return operands
    pairs = zip(function.operands, operands, strict=True)
    return tuple([_scalar(spec.name, value, x) if spec.kind == SCALAR else value for spec, value in pairs])


def by_name(function: Function, operands: Operands) -> list[tuple[str, Any]]:
    """The operands and their names."""
    return [(spec.name, value) for spec, value in zip(function.operands, operands, strict=False)]


def _scalar(name: str, value: Any, x: Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return value
    if not _is_constant(value):
        return _on_device(value, x)
    return value if type(value) is float else checks.scalar_number(name, value)


def _on_device(number: float, x: Tensor) -> Tensor:
    """A number as a 0-d tensor in fp64. It is a product: compilers keep one graph of it for all values."""
    symbol: float = torch.sym_float(number)  # type: ignore[no-untyped-call]
    return x.new_ones((), dtype=torch.float64) * symbol


def _is_constant(number: float) -> bool:
    """Whether a number is a constant of the trace, and no symbol: as a number that has changed, or of a size."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow, but Dynamo has it

    if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        return True  # the checks raise the error
    return has_static_value(number)


def _is_symbol(number: Any) -> TypeGuard[float]:
    """Whether a scalar is a symbol of the trace that goes on here."""
    # For Dynamo, which traces this, all numbers have the types of constants.
    return (is_traced() or isinstance(number, (torch.SymInt, torch.SymFloat))) and not _is_constant(number)


def _shares_rows(value: object, x: object) -> bool:
    """Whether a matrix has 1 in place of the last leading axes of x."""
    if not isinstance(value, Tensor) or value.is_nested:
        return False  # a nested tensor has no shape
    shape = value.shape
    if len(shape) < 2 or shape[-2] != 1 or not isinstance(x, Tensor) or x.is_nested:
        return False
    return KINDS[MATRIX].shares_rows(shape, x.shape[:-1], shape[-1])


@at_trace_time
def _make(key: str, folded: _Choice, shared: _Choice) -> None:
    typed(TRACED[key], folded, shared)
