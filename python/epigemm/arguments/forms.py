"""The epilogue of a function for the types of a call's operands.

A matrix or vector may have x's type, or the arithmetic's beside an x of 16 bits; a matrix may have a row for several of
x's. Each such choice is an epilogue of its own, which is registered when it is first met.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.compilers import at_trace_time, is_traced
from epigemm.epilogues.declaration import TRACED, Traced
from epigemm.epilogues.kinds import KINDS, MATRIX
from epigemm.epilogues.registry import Epilogue, Operands, typed

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
