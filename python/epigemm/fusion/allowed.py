"""What the code of a forward may hold: instructions that write nothing that outlives it, names that can be watched."""

from __future__ import annotations

import functools
import math
import operator
import os
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from epigemm.fusion.values import is_constant

# With a separator at the end: site-packages/torchvision is not torch.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent) + os.sep
_CONTAINERS = str(Path(nn.__file__).parent / "modules" / "container.py")
_FX = str(Path(fx.__file__).parent) + os.sep


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


INSTRUCTIONS = _words(
    """
    NOP CACHE RESUME EXTENDED_ARG POP_TOP DUP_TOP DUP_TOP_TWO ROT_TWO ROT_THREE ROT_FOUR ROT_N COPY SWAP PUSH_NULL
    NOT_TAKEN POP_ITER END_FOR KW_NAMES PRECALL GEN_START RETURN_GENERATOR MAKE_CELL COPY_FREE_VARS RERAISE
    LOAD_CONST LOAD_SMALL_INT LOAD_GLOBAL LOAD_DEREF LOAD_CLOSURE LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR
    LOAD_ASSERTION_ERROR LOAD_COMMON_CONSTANT STORE_DEREF DELETE_FAST STORE_SUBSCR DELETE_SUBSCR STORE_SLICE
    BUILD_LIST BUILD_TUPLE BUILD_MAP BUILD_CONST_KEY_MAP BUILD_STRING BUILD_SLICE LIST_APPEND LIST_EXTEND
    LIST_TO_TUPLE MAP_ADD DICT_UPDATE DICT_MERGE UNPACK_SEQUENCE UNPACK_EX FORMAT_VALUE FORMAT_SIMPLE
    FORMAT_WITH_SPEC CONVERT_VALUE CONTAINS_OP COMPARE_OP IS_OP TO_BOOL GET_ITER FOR_ITER RETURN_VALUE RETURN_CONST
    RAISE_VARARGS MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE YIELD_VALUE CALL_INTRINSIC_1
    """
)
FAMILIES = (
    "LOAD_FAST",
    "STORE_FAST",
    "UNARY_",
    "BINARY_",
    "INPLACE_",
    "CALL_FUNCTION",
    "CALL_METHOD",
    "JUMP_",
    "POP_JUMP_",
)
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_METHOD")
INTRINSICS = (3, 5, 6)  # StopIteration in generators, unary plus, list to tuple
REFUSED = {
    "STORE_ATTR": "assigns the attribute",
    "DELETE_ATTR": "deletes the attribute",
    "STORE_GLOBAL": "assigns the global",
    "DELETE_GLOBAL": "deletes the global",
    "IMPORT_NAME": "imports",
    "SETUP_WITH": "has a with block",
    "BEFORE_WITH": "has a with block",
    "LOAD_SPECIAL": "has a with block",
    "SETUP_FINALLY": "has a try block",
    "PUSH_EXC_INFO": "has a try block",
}
BUILTINS = (
    *(len, range, zip, enumerate, reversed, sum, min, max, abs, round, pow, divmod, all, any, map, filter),
    *(iter, next, tuple, list, dict, int, float, bool, str, slice, super, isinstance),
)
_OPERATORS = _words(
    """
    add sub mul truediv floordiv mod neg pos matmul pow iadd isub imul itruediv lt le gt ge eq ne getitem and_ or_
    xor invert
    """
)


@functools.cache
def _functions() -> dict[int, Any]:
    """The functions that are nothing but their arguments' functions, by id."""
    overridable = torch.overrides.get_overridable_functions()
    found = {id(function): function for functions in overridable.values() for function in functions}
    in_place = [
        value for name, value in vars(torch).items() if id(vars(torch).get(name.rstrip("_"))) in found
    ]
    of_math = [value for value in vars(math).values() if callable(value)]
    # The first two are methods of their argument, written as functions; torch does not list them.
    others = [F.sigmoid, F.tanh, typing.cast, vars(torch.jit)["is_scripting"]]
    operators = [getattr(operator, name) for name in _OPERATORS]
    found.update({id(value): value for value in (*in_place, *of_math, *others, *operators)})
    return found


def is_pure_function(value: Any) -> bool:
    """Whether a value is a function of torch, math or operator whose call becomes a node, or a constant."""
    if not callable(value) or _functions().get(id(value)) is not value:
        return False
    # What somebody put in the place of one of them is not torch's.
    return value is typing.cast or not isinstance(value, types.FunctionType) or is_of_torch(value.__code__)


def is_of_torch(code: types.CodeType) -> bool:
    """Whether a piece of code belongs to torch."""
    return code.co_filename.startswith(_TORCH)


def may_call(code: types.CodeType) -> bool:
    """Whether a forward may call this code of torch: it only iterates over modules, or writes nodes."""
    return code.co_filename == _CONTAINERS or code.co_filename.startswith(_FX)


def is_own(code: types.CodeType) -> bool:
    """Whether a piece of code is fusion's."""
    return code.co_filename.startswith(_OWN)


def is_dunder(name: str) -> bool:
    """Whether a name is one of Python's own."""
    return name.startswith("__") and name.endswith("__")


def is_admissible(value: Any) -> bool:
    """Whether a value that is read from outside of a forward can be watched, and what is read from it too."""
    if is_constant(value) or is_pure_function(value):
        return True
    if isinstance(value, types.FunctionType):
        return not is_of_torch(value.__code__)
    return any(value is builtin for builtin in BUILTINS)


def original(value: Any) -> Any:
    """The function that stand-ins of `proxies.recorded_math` were made for."""
    while isinstance(value, types.FunctionType) and "_epigemm_original" in vars(value):
        value = vars(value)["_epigemm_original"]
    return value
