"""What a function takes from around itself: numbers become constants, what may change is refused."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType

import torch

from epigemm.functor_lines import is_users

_NUMBERS = (bool, int, float, str, bytes, complex, type(None), torch.dtype)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_FIXED = (ModuleType, type, BuiltinFunctionType, enum.Enum, *_OPERATORS)
_MISSING = object()
_GRADIENT_MODE = "{name} is not supported; tensor.detach() ends a derivative"
_STATE = "{name} reads a state of PyTorch's, which is another one at a call; write one function for each"
# What no trace sees being read, as an attribute or, of torch's functions, by name.
_REFUSED = {
    **dict.fromkeys(
        ("device", "is_cuda", "is_cpu", "get_device", "cuda", "cpu"),
        "the device is read; an epilogue is the same on each",
    ),
    **dict.fromkeys(("no_grad", "enable_grad", "set_grad_enabled", "inference_mode"), _GRADIENT_MODE),
    **dict.fromkeys(
        ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_default_dtype"), _STATE
    ),
    "Parameter": "Parameter is read; whether a tensor is one makes no difference to an epilogue",
    **dict.fromkeys(("requires_grad", "is_leaf", "grad_fn", "is_inference", "is_compiling"), _STATE),
}


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and isinstance(a, (*_NUMBERS, tuple)) and a == b


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(part) for part in value)
    return isinstance(value, _NUMBERS)


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
    """One captured value, of a cell or a module's global: its name, its value then, and how to read it now."""

    name: str
    value: object
    now: Callable[[], object]


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
    _check(function, inspect.unwrap(function), function.__name__, function)
    while waiting:
        current = waiting.pop()
        if any(known is current for known, _ in codes):
            continue
        codes.append((current, current.__code__))
        _check_attributes(function, current)
        defaults = () if current is function else _defaults(current)
        for captured in (*_reads(current), *defaults):
            values.append(captured)
            _check(function, current, captured.name, captured.value)
            if isinstance(captured.value, FunctionType):
                # A decorator of torch's is followed to the function that it decorates.
                both = (captured.value, getattr(captured.value, "__wrapped__", None))
                waiting += [
                    each
                    for each in both
                    if isinstance(each, FunctionType) and is_users(each.__code__.co_filename)
                ]
    return Captures(tuple(codes), tuple(values))


def _reads(function: FunctionType) -> Iterator[_Captured]:
    """Cells, globals, and what is read of modules, classes and functions among them by dots."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    chains = {(name,): None for name in cells} | dict.fromkeys(
        chain for code in _code_objects(function.__code__) for chain in _chains(code, cells)
    )
    for name, *attributes in chains:
        start: Callable[[], object] | None = None
        if name in cells:
            start = functools.partial(_contents, cells[name])
        elif name in function.__globals__:
            start = functools.partial(function.__globals__.get, name, _MISSING)
        if start is None:
            continue
        value = start()
        yield _Captured(name, value, start)
        path: tuple[str, ...] = ()
        for attribute in attributes:
            if not isinstance(value, (ModuleType, type, FunctionType)) or _is_steady(value):
                break
            path = (*path, attribute)
            now = functools.partial(_attribute, start, path)
            value = now()
            yield _Captured(".".join((name, *path)), value, now)


def _chains(code: CodeType, cells: dict[str, CellType]) -> Iterator[tuple[str, ...]]:
    """The names that code reads from around it, each with the attributes that are read of it at once: `C.a`."""
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":  # a part of the next one
            continue
        if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, instruction.argval)
            continue
        if chain:
            yield chain
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (
            instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and instruction.argval in cells
        )
        chain = (instruction.argval,) if is_name else ()


def _is_steady(value: ModuleType | type | FunctionType) -> bool:
    """Whether it is of Python, epigemm or a package that is installed, none of which changes."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    file = getattr(sys.modules.get(name, value), "__file__", None)
    if file is None:  # built into Python, or made at run time
        return name.partition(".")[0] in sys.builtin_module_names
    folders = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", _PYTEST)
    return not is_users(file) or any(folder in file for folder in folders)


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
            yield _Captured(f"{function.__name__}({name}=)", parameter.default, now)


def _default(function: FunctionType, name: str) -> object:
    by_name = (function.__kwdefaults__ or {}).get(name, _MISSING)
    if by_name is not _MISSING:
        return by_name
    code, defaults = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    return dict(zip(last, defaults, strict=True)).get(name, _MISSING)


def _check_attributes(function: FunctionType, reader: FunctionType) -> None:
    for code in _code_objects(reader.__code__):
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            if isinstance(instruction.starts_line, int) and not isinstance(instruction.starts_line, bool):
                line = instruction.starts_line
            line = getattr(instruction, "line_number", None) or line  # from Python 3.13 on
            is_read = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") or (
                instruction.opname == "LOAD_CONST" and "getattr" in code.co_names
            )
            if is_read and isinstance(instruction.argval, str) and instruction.argval in _REFUSED:
                reason = _REFUSED[instruction.argval].format(name=instruction.argval)
                raise NotImplementedError(f"{function.__name__} ({code.co_filename}:{line}): {reason}")


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _check(function: FunctionType, reader: FunctionType, name: str, value: object) -> None:
    place = f"{function.__name__} ({reader.__code__.co_filename}:{reader.__code__.co_firstlineno})"
    if isinstance(value, torch.Tensor):
        raise NotImplementedError(
            f"{place}: {name!r} is a captured tensor of shape {list(value.shape)}; give it as an operand (PerColumn, "
            "PerRow, Matrix or Scalar)"
        )
    if isinstance(value, FunctionType) and value.__code__.co_name == "decorate_context":
        raise NotImplementedError(
            f"{place}: {_GRADIENT_MODE.format(name='no_grad, or the like, of ' + name)}"
        )
    known = str(getattr(value, "__name__", ""))
    if known in _REFUSED and any(
        value is getattr(of, known, None) for of in (torch, torch.compiler, torch.nn)
    ):
        raise NotImplementedError(f"{place}: {_REFUSED[known].format(name=known)}")
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        raise NotImplementedError(
            f"{place}: {name!r} is a torch.autograd.Function, whose backward would be lost: the derivative of an "
            "epilogue is that of its formula; write its forward as plain PyTorch"
        )
    if (
        isinstance(value, FunctionType)
        or value is _MISSING
        or _is_constant(value)
        or isinstance(value, _FIXED)
    ):
        return
    # Of the callables these hold an instance's numbers, a slope or the like.
    of_torch = type(value).__module__.partition(".")[0] in ("torch", "builtins")
    if callable(value) and of_torch and not isinstance(value, (torch.nn.Module, MethodType)):
        return
    raise TypeError(
        f"{place}: {name!r} is captured, and a {type(value).__name__} may change unseen; captured are numbers, "
        "strings, tuples of them, modules and functions; numbers become constants of the epilogue"
    )
