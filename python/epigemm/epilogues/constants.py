"""What a function reads from outside: numbers become constants, and what may change unnoticed is refused.

The trace itself refuses captured tensors, gradients that are switched off, and derivatives of one's own.
"""

from __future__ import annotations

import builtins
import dis
import enum
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch

from epigemm.epilogues.tracer.lines import is_users
from epigemm.epilogues.tracer.program import words

_NUMBERS = (bool, int, float, str, bytes, complex, tuple, type(None), torch.dtype)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_BOUND = (BuiltinFunctionType, MethodWrapperType)  # functions in C, perhaps bound to an object: `table.get`
_FIXED = (ModuleType, type, *_OPERATORS)
_BUILTIN = frozenset(vars(builtins))
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
_PYTEST = f"{os.sep}_pytest{os.sep}"
"""pytest, wherever it is installed: it rewrites asserts so that they read its settings."""


def _is_constant(value: object) -> bool:
    """Whether a value is immutable, such as a number or a text, and not of a class that adds attributes."""
    if isinstance(value, enum.Enum):
        return _is_constant(value.value)
    if isinstance(value, tuple) and not all(map(_is_constant, value)):
        return False
    return isinstance(value, _NUMBERS) and not hasattr(value, "__dict__")


@dataclass(frozen=True)
class _Captured:
    """One captured value, of a cell or a module's global, and the place where it is read."""

    name: str
    value: object
    place: str
    is_passed_on: bool = False  # as a whole, so that its attributes are read where the trace does not notice


def check(function: FunctionType) -> None:
    """Check what `function`, and the user's functions that it calls, read from outside.

    Raises:
        TypeError: for a value whose changes could go unnoticed, such as a list or an instance.
        NotImplementedError: if the function reads the device, a state, or something whose changes could go unnoticed.
    """
    known: list[FunctionType] = []
    # A decorator of torch that switches gradients reads nothing.
    is_switch = function.__code__.co_name == "decorate_context"
    waiting: list[FunctionType] = [vars(function)["__wrapped__"] if is_switch else function]
    while waiting:
        current = waiting.pop()
        if any(each is current for each in known):
            continue
        known.append(current)
        for captured in (*_reads(current, function.__name__), *(_defaults(current) if known[1:] else ())):
            _check(function.__name__, captured)
            # For a decorator of torch the decorated function is examined.
            for each in (captured.value, getattr(captured.value, "__wrapped__", None)):
                if isinstance(each, FunctionType) and is_users(each.__code__.co_filename):
                    waiting.append(each)


def _reads(function: FunctionType, epilogue: str) -> Iterator[_Captured]:
    """Cells and globals, and the attributes of modules, classes and functions among them."""
    code = function.__code__
    start = f"{code.co_filename}:{code.co_firstlineno}"
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    chains: dict[tuple[str, ...], str] = {}
    for chain, place in _chains(code, cells, function.__globals__, epilogue):
        chains.setdefault(chain, place)
    unread = {(name,): start for name in cells.keys() - {chain[0] for chain in chains}}
    for (name, *attributes), place in (chains | unread).items():
        if name in cells:
            value = contents(cells[name])
        elif name in function.__globals__:
            value = function.__globals__[name]
        elif name not in _BUILTIN:
            value = getattr(builtins, name, _MISSING)
        else:
            continue
        found = _Captured(name, value, place, not attributes)
        yield found
        for count, attribute in enumerate(attributes, 1):
            value = found.value
            if not isinstance(value, (ModuleType, type, FunctionType, enum.Enum)) or _is_steady(value):
                break
            value = getattr(value, attribute, _MISSING)
            found = _Captured(f"{found.name}.{attribute}", value, place, count == len(attributes))
            yield found


def _chains(
    code: CodeType, cells: dict[str, CellType], names: dict[str, object], epilogue: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The names that code reads from outside, each with the attributes that are read of it, and its place.

    Refuses attributes whose reads a trace does not notice, and code that reads names dynamically.
    """
    chain: tuple[str, ...] = ()
    place = at = ""
    before: list[object] = []
    lines = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if lines.get(instruction.offset):
            at = f"{code.co_filename}:{lines[instruction.offset]}"
        if operation == "EXTENDED_ARG":  # a part of the next instruction
            continue
        is_attribute = operation in ("LOAD_ATTR", "LOAD_METHOD")
        reason = None
        if (
            is_attribute
            or operation == "IMPORT_FROM"
            or (operation == "LOAD_CONST" and isinstance(name, str) and "getattr" in code.co_names)
        ):
            reason = _REFUSED.get(name)
        elif operation == "LOAD_GLOBAL" and name in _READERS and name not in names:
            reason = _UNSEEN
        elif operation == "IMPORT_NAME" and (before[-2] or not _is_known(name)):
            reason = "{name} is imported inside, and may change unseen; import it outside of the function"
        if reason is not None:
            raise NotImplementedError(f"{epilogue} ({at}): {reason.format(name=name)}")
        before.append(name)
        if chain and is_attribute:
            chain = (*chain, name)
            continue
        if chain:
            yield chain, place
        is_cell = operation in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells
        chain, place = (name,) if is_cell or operation in ("LOAD_GLOBAL", "LOAD_NAME") else (), at
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner, cells, names, epilogue)


def _is_steady(value: ModuleType | type | FunctionType | enum.Enum) -> bool:
    """Whether a value belongs to Python, epigemm or an installed package, which are assumed not to change."""
    if value is sys or value is builtins:  # through them everything can be reached
        return False
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):  # the trace refuses it
        return True
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    file = getattr(sys.modules.get(name, value), "__file__", None)
    if file is None:  # a builtin of Python, or made at run time
        return name.partition(".")[0] in sys.builtin_module_names
    folders = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", _PYTEST)
    return not is_users(file) or any(folder in file for folder in folders)


def _has_attributes(value: object) -> bool:
    """Whether it has attributes of the user's, which may change."""
    if isinstance(value, FunctionType):
        return bool(vars(value).keys() - {"__wrapped__"}) and not _is_steady(value)
    return isinstance(value, (ModuleType, type)) and not _is_steady(value)


def contents(cell: CellType) -> object:
    """A cell's content, if it has one already."""
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _defaults(function: FunctionType) -> Iterator[_Captured]:
    """The defaults of a function that the epilogue calls."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    for name, value in ((function.__kwdefaults__ or {}) | dict(zip(names, defaults, strict=True))).items():
        place = f"{code.co_filename}:{code.co_firstlineno}"
        yield _Captured(f"{function.__name__}({name}=)", value, place, is_passed_on=True)


def _is_known(module: str) -> bool:
    """Whether a module by this name is of Python or of a package that is installed."""
    loaded = sys.modules.get(module)
    return module.partition(".")[0] in sys.stdlib_module_names if loaded is None else _is_steady(loaded)


def _check(epilogue: str, captured: _Captured) -> None:
    place, name, value = f"{epilogue} ({captured.place})", captured.name, captured.value
    known = str(getattr(value, "__name__", "")).rpartition(".")[-1]
    if known in _REFUSED and any(value is getattr(of, known, None) for of in _READ_OF):
        raise NotImplementedError(f"{place}: {_REFUSED[known].format(name=known)}")
    if captured.is_passed_on and _has_attributes(value):
        raise NotImplementedError(
            f"{place}: {name!r} is used as a whole, and what is read of it may change unseen; read {name}.attribute"
        )
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
