"""What a function takes from around itself: numbers become constants, what may change is refused."""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
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

from epigemm.epilogues.tracing.lines import is_users
from epigemm.epilogues.tracing.program import words

_NUMBERS = (bool, int, float, str, bytes, complex, tuple, type(None), torch.dtype)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_BOUND = (BuiltinFunctionType, MethodWrapperType)  # functions in C, perhaps of an object: `table.get`
_FIXED = (ModuleType, type, *_OPERATORS)
_BUILTIN = frozenset(vars(builtins))
_MISSING = object()
_GRADIENT_MODE = "{name} is not supported; tensor.detach() ends a derivative"
_STATE = "{name} reads a state of PyTorch's, which is another one at a call; write one function for each"
_UNSEEN = "{name} reads what may change unseen; write the name that it reads"
_READERS = ("globals", "vars", "eval", "exec", "__import__", "open")
# What no trace sees being read, as an attribute or, of torch's functions, by name.
_REFUSED = {
    **dict.fromkeys(
        ("device", "is_cuda", "is_cpu", "get_device", "cuda", "cpu"),
        "the device is read; an epilogue is the same on each",
    ),
    **dict.fromkeys(("no_grad", "enable_grad", "set_grad_enabled", "inference_mode"), _GRADIENT_MODE),
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


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and isinstance(a, _NUMBERS) and a == b


def _is_constant(value: object) -> bool:
    """Whether it is a number, or the like, of which nothing may change: no attribute of a class made of one."""
    if isinstance(value, enum.Enum):
        return _is_constant(value.value)
    if isinstance(value, tuple) and not all(map(_is_constant, value)):
        return False
    return isinstance(value, _NUMBERS) and not hasattr(value, "__dict__")


def _code_objects(code: CodeType) -> list[CodeType]:
    inner = [
        part
        for constant in code.co_consts
        if isinstance(constant, CodeType)
        for part in _code_objects(constant)
    ]
    return [code, *inner]


_PYTEST = f"{os.sep}_pytest{os.sep}"
"""Wherever it is installed: it rewrites asserts so that they read its settings."""


@dataclass(frozen=True)
class _Captured:
    """One captured value, of a cell or a module's global: its name, its value then, how to read it now, and where."""

    name: str
    value: object
    now: Callable[[], object]
    place: str
    is_passed_on: bool = False  # as a whole, to be read out of sight


@dataclass(frozen=True)
class Captures:
    """What a function and the functions that it calls have captured."""

    # of the function and of the user's functions that it calls
    codes: tuple[tuple[FunctionType, CodeType], ...]
    values: tuple[_Captured, ...]  # what they read from around them

    def changed(self) -> str | None:
        """The name of what has changed since; None where nothing has."""
        for function, code in self.codes:
            if function.__code__ is not code:
                return function.__name__
        for captured in self.values:
            now = captured.now()
            if now is not captured.value and not _equal(now, captured.value):
                return captured.name
        return None


NONE = Captures((), ())


def captures_of(function: FunctionType) -> Captures:
    """What `function` has captured.

    Raises:
        TypeError: for a value that may change unseen, such as a list or an instance.
        NotImplementedError: for a tensor, a function with a derivative of its own, and where the device or a state is
            read or gradients are switched off.
    """
    codes: list[tuple[FunctionType, CodeType]] = []
    values: list[_Captured] = []
    waiting: list[FunctionType] = [function]
    place = _start(inspect.unwrap(function))
    _check(function.__name__, _Captured(function.__name__, function, lambda: function, place))
    while waiting:
        current = waiting.pop()
        if any(known is current for known, _ in codes):
            continue
        codes.append((current, current.__code__))
        for code in _code_objects(current.__code__):
            _check_names(function.__name__, code, current)
        defaults = () if current is function else _defaults(current)
        for captured in (*_reads(current), *defaults):
            values.append(captured)
            _check(function.__name__, captured)
            if isinstance(captured.value, FunctionType):
                # A decorator of torch's is followed to the function that it decorates.
                both = (captured.value, getattr(captured.value, "__wrapped__", None))
                waiting += [
                    each
                    for each in both
                    if isinstance(each, FunctionType) and is_users(each.__code__.co_filename)
                ]
    return Captures(tuple(codes), tuple(values))


def _start(function: FunctionType) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def _reads(function: FunctionType) -> Iterator[_Captured]:
    """Cells, globals, and what is read of modules, classes and functions among them by dots."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    chains: dict[tuple[str, ...], str] = {}
    for code in _code_objects(function.__code__):
        for chain, place in _chains(code, cells):
            chains.setdefault(chain, place)
    for name in cells.keys() - {chain[0] for chain in chains}:
        chains[(name,)] = _start(function)
    for (name, *attributes), place in chains.items():
        start: Callable[[], object] | None = None
        if name in cells:
            start = functools.partial(_contents, cells[name])
        elif name in function.__globals__:
            start = functools.partial(function.__globals__.get, name, _MISSING)
        elif name not in _BUILTIN:
            start = functools.partial(getattr, builtins, name, _MISSING)
        if start is None:
            continue
        found = _Captured(name, start(), start, place, not attributes)
        yield found
        path: tuple[str, ...] = ()
        for attribute in attributes:
            value = found.value
            if not isinstance(value, (ModuleType, type, FunctionType, enum.Enum)) or _is_steady(value):
                break
            path = (*path, attribute)
            now = functools.partial(_attribute, start, path)
            found = _Captured(".".join((name, *path)), now(), now, place, len(path) == len(attributes))
            yield found


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, str]]:
    """Each with its place."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.starts_line, int) and not isinstance(instruction.starts_line, bool):
            line = instruction.starts_line
        line = getattr(instruction, "line_number", None) or line  # from Python 3.13 on
        if instruction.opname != "EXTENDED_ARG":  # a part of the next one
            yield instruction, f"{code.co_filename}:{line}"


def _chains(code: CodeType, cells: dict[str, CellType]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The names that code reads from around it, each with the attributes that are read of it at once: `C.a`."""
    chain: tuple[str, ...] = ()
    at = ""
    for instruction, place in _instructions(code):
        if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, instruction.argval)
            continue
        if chain:
            yield chain, at
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (
            instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and instruction.argval in cells
        )
        chain, at = (instruction.argval,) if is_name else (), place


def _is_steady(value: ModuleType | type | FunctionType | enum.Enum) -> bool:
    """Whether it is of Python, epigemm or a package that is installed, none of which changes."""
    if value is sys or value is builtins:  # they hold all modules, and names for all of them
        return False
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    file = getattr(sys.modules.get(name, value), "__file__", None)
    if file is None:  # built into Python, or made at run time
        return name.partition(".")[0] in sys.builtin_module_names
    folders = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", _PYTEST)
    return not is_users(file) or any(folder in file for folder in folders)


def _has_attributes(value: object) -> bool:
    """Whether it has some of the user's, which may change."""
    if isinstance(value, FunctionType):
        return bool(vars(value).keys() - {"__wrapped__"}) and not _is_steady(value)
    return isinstance(value, (ModuleType, type)) and not _is_steady(value)


def _attribute(start: Callable[[], object], path: tuple[str, ...]) -> object:
    value = start()
    for name in path:
        value = getattr(value, name, _MISSING)
    return value


def _defaults(function: FunctionType) -> Iterator[_Captured]:
    """The defaults of a function that the epilogue calls."""
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            now = functools.partial(_default, function, name)
            title = f"{function.__name__}({name}=)"
            yield _Captured(title, parameter.default, now, _start(function), is_passed_on=True)


def _default(function: FunctionType, name: str) -> object:
    by_name = (function.__kwdefaults__ or {}).get(name, _MISSING)
    if by_name is not _MISSING:
        return by_name
    code, defaults = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    return dict(zip(last, defaults, strict=True)).get(name, _MISSING)


def _check_names(epilogue: str, code: CodeType, reader: FunctionType) -> None:
    """Refuses attributes that no trace sees, and what reads names that no captured value stands for."""
    before: list[dis.Instruction] = []
    for instruction, place in _instructions(code):
        name = instruction.argval
        is_attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") or (
            instruction.opname == "LOAD_CONST" and "getattr" in code.co_names
        )
        reason = None
        if is_attribute and isinstance(name, str):
            reason = _REFUSED.get(name)
        elif instruction.opname == "LOAD_GLOBAL" and name in _READERS and name not in reader.__globals__:
            reason = _UNSEEN
        elif instruction.opname == "IMPORT_NAME" and (before[-2].argval or not _is_known(name)):
            reason = "{name} is imported inside, and may change unseen; import it outside of the function"
        if reason is not None:
            raise NotImplementedError(f"{epilogue} ({place}): {reason.format(name=name)}")
        before.append(instruction)


def _is_known(module: str) -> bool:
    """Whether a module by this name is of Python or of a package that is installed."""
    loaded = sys.modules.get(module)
    return module.partition(".")[0] in sys.stdlib_module_names if loaded is None else _is_steady(loaded)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _check(epilogue: str, captured: _Captured) -> None:
    place, name, value = f"{epilogue} ({captured.place})", captured.name, captured.value
    if isinstance(value, torch.Tensor):
        raise NotImplementedError(
            f"{place}: {name!r} is a captured tensor of shape {list(value.shape)}; give it as an operand (PerColumn, "
            "PerRow, Matrix or Scalar)"
        )
    if isinstance(value, FunctionType) and value.__code__.co_name == "decorate_context":
        raise NotImplementedError(
            f"{place}: {_GRADIENT_MODE.format(name='no_grad, or the like, of ' + name)}"
        )
    known = str(getattr(value, "__name__", "")).rpartition(".")[-1]
    if known in _REFUSED and any(value is getattr(of, known, None) for of in _READ_OF):
        raise NotImplementedError(f"{place}: {_REFUSED[known].format(name=known)}")
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        raise NotImplementedError(
            f"{place}: {name!r} is a torch.autograd.Function, whose backward would be lost: the derivative of an "
            "epilogue is that of its formula; write its forward as plain PyTorch"
        )
    if captured.is_passed_on and _has_attributes(value):
        raise NotImplementedError(
            f"{place}: {name!r} is used as a whole, and what is read of it may change unseen; read {name}.attribute"
        )
    holder = getattr(value, "__self__", None) if isinstance(value, _BOUND) else value
    if (
        isinstance(value, FunctionType)
        or value is _MISSING
        or _is_constant(holder)
        or isinstance(holder, _FIXED)
    ):
        return
    # Of the callables these hold an instance's numbers, a slope or the like.
    of_torch = type(value).__module__.partition(".")[0] in ("torch", "builtins")
    if callable(value) and of_torch and not isinstance(value, (torch.nn.Module, MethodType, *_BOUND)):
        return
    raise TypeError(
        f"{place}: {name!r} is captured, and a {type(value).__name__} may change unseen; captured are numbers, "
        "strings, tuples of them, modules and functions; numbers become constants of the epilogue"
    )
