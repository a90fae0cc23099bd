"""What a function reads from outside: numbers become constants, as they are at the decoration.

Refused is what would be another value at a call: the device, a state of PyTorch's, the environment, and what is
captured in order to change, as a list. The trace itself refuses captured tensors, gradients that are switched off, and
derivatives of one's own.
"""

from __future__ import annotations

import dis
import enum
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch

from epigemm.epilogues.tracer.program import words

_NUMBERS = (bool, int, float, str, bytes, complex, tuple, type(None), torch.dtype)
_BOUND = (BuiltinFunctionType, MethodWrapperType)  # functions in C, perhaps bound to an object: `table.get`
_FIXED = (ModuleType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_MISSING = object()
_STATE = "{name} reads a state of PyTorch's, which is another one at a call; write one function for each"
_UNSEEN = "{name} reads what may change unseen; write the name that it reads"
_READERS = ("globals", "vars", "eval", "exec", "__import__", "open")
# Reads that a trace does not notice, of an attribute or by a function of torch.
_REFUSED = {
    **dict.fromkeys(
        ("device", "is_cuda", "is_cpu", "get_device", "cuda", "cpu"),
        "the device is read; an epilogue is the same on each",
    ),
    **dict.fromkeys(
        words(
            "is_grad_enabled is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled get_default_dtype "
            "get_float32_matmul_precision are_deterministic_algorithms_enabled get_num_threads backends "
            "requires_grad is_leaf grad_fn is_inference is_compiling is_dynamo_compiling"
        ),
        _STATE,
    ),
    "Parameter": "Parameter is read; whether a tensor is one makes no difference to an epilogue",
    **dict.fromkeys(
        words("import_module environ getenv _getframe currentframe f_globals f_locals __globals__ __dict__"),
        _UNSEEN,
    ),
}
_READ_OF: tuple[Any, ...] = (torch, torch.compiler, torch.nn, importlib, inspect, os, sys)


def check(function: FunctionType) -> None:
    """Check what `function`, and the user's functions that it calls, read from outside.

    Raises:
        TypeError: for a captured value that is made to change, such as a list or an instance.
        NotImplementedError: if the function reads the device, a state, or what may change unseen.
    """
    # A decorator of torch that switches gradients reads nothing.
    is_switch = function.__code__.co_name == "decorate_context"
    waiting = [vars(function)["__wrapped__"] if is_switch else function]
    known: set[FunctionType] = set()
    while waiting:
        current = waiting.pop()
        known.add(current)
        cells = dict(zip(current.__code__.co_freevars, current.__closure__ or (), strict=True))
        for value in _read(current.__code__, cells, current.__globals__, function.__name__):
            # For a decorator of torch the decorated function is examined.
            for each in (value, getattr(value, "__wrapped__", None)):
                if isinstance(each, FunctionType) and is_users(each.__code__.co_filename):
                    waiting += [each] if each not in known else []


def _read(
    code: CodeType, cells: Mapping[str, CellType], names: Mapping[str, object], epilogue: str
) -> Iterator[object]:
    """What code reads from outside: cells, globals, and attributes of modules and classes among them."""
    value: object = _MISSING
    place = ""
    lines = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if lines.get(instruction.offset):
            place = f"{epilogue} ({code.co_filename}:{lines[instruction.offset]})"
        if operation == "EXTENDED_ARG":  # a part of the next instruction
            continue
        is_attribute = operation in ("LOAD_ATTR", "LOAD_METHOD")
        is_name = operation == "LOAD_CONST" and isinstance(name, str) and "getattr" in code.co_names
        reason = _REFUSED.get(name) if is_attribute or is_name or operation == "IMPORT_FROM" else None
        if operation == "LOAD_GLOBAL" and name in _READERS and name not in names:
            reason = _UNSEEN
        if reason is not None:
            raise NotImplementedError(f"{place}: {reason.format(name=name)}")
        if is_attribute and isinstance(value, (ModuleType, type)):
            value = getattr(value, name, _MISSING)
            value = _MISSING if _is_installed(value) else value
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = names.get(name, _MISSING)
            _check(place, name, value)
        elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
            value = contents(cells[name])
            _check(place, name, value)
        else:
            value = _MISSING
        yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _read(inner, cells, names, epilogue)


def _is_installed(value: object) -> bool:
    """Whether it is a function of Python or of an installed package, which is assumed to read no state."""
    file = value.__code__.co_filename if isinstance(value, FunctionType) else ""
    return any(folder in file for folder in (sysconfig.get_path("stdlib"), "site-packages", "dist-packages"))


def contents(cell: CellType) -> object:
    """A cell's content, if it has one already."""
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _check(place: str, name: str, value: object) -> None:
    known = str(getattr(value, "__name__", "")).rpartition(".")[-1]
    if known in _REFUSED and any(value is getattr(of, known, None) for of in _READ_OF):
        raise NotImplementedError(f"{place}: {_REFUSED[known].format(name=known)}")
    holder = getattr(value, "__self__", None) if isinstance(value, _BOUND) else value
    is_traced = isinstance(value, (FunctionType, torch.Tensor))
    if value is _MISSING or is_traced or _is_constant(holder) or isinstance(holder, _FIXED):
        return
    # These callables hold numbers of an instance, such as a slope.
    of_torch = type(value).__module__.partition(".")[0] in ("torch", "builtins")
    if callable(value) and of_torch and not isinstance(value, (torch.nn.Module, MethodType, *_BOUND)):
        return
    raise TypeError(
        f"{place}: {name!r} is captured, and a {type(value).__name__} may change unseen; accepted are numbers, "
        "strings, tuples of them, modules and functions; numbers become constants of the epilogue"
    )


def _is_constant(value: object) -> bool:
    """Whether a value is immutable, such as a number or a text, and not of a class that adds attributes."""
    if isinstance(value, enum.Enum):
        return _is_constant(value.value)
    if isinstance(value, tuple) and not all(map(_is_constant, value)):
        return False
    return isinstance(value, _NUMBERS) and not hasattr(value, "__dict__")


# --- the user's code, and the line of it that is running --------------------------------------------------------------


_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


def is_users(filename: str) -> bool:
    """Whether a source file is the user's: not of torch, of this package or of Python itself."""
    return not filename.startswith((_TORCH, _PACKAGE, "<frozen", "<eval_with_key>"))


def user_line(frame: FrameType, fallback: str) -> str:
    """`file:line` of the user's innermost frame."""
    for each, number in traceback.walk_stack(frame):
        name = each.f_code.co_filename
        if is_users(name) and "contextlib" not in name:
            return f"{name}:{number}"
    return fallback


def return_line(function: Callable[..., Any], last: str) -> str:
    """`file:line` of the `return` that follows the last call of torch, which is at `last`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return last
    file, _, number = last.rpartition(":")
    returns = {each.offset for each in dis.get_instructions(code) if each.opname.startswith("RETURN_")}
    lines = sorted(
        line for start, end, line in code.co_lines() if line and not returns.isdisjoint(range(start, end))
    )
    after = [line for line in lines if file == code.co_filename and line >= int(number)]
    return f"{code.co_filename}:{(after or lines[-1:])[0]}"
