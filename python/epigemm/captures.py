"""What a function takes from around itself: numbers become constants, what may change is refused."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType

import torch

from epigemm.functor_trace import is_users

_NUMBERS = (bool, int, float, str, bytes, complex, type(None), torch.dtype)
_FIXED = (ModuleType, type, BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_MISSING = object()
# Attributes that no trace sees being read.
_REFUSED = {
    **dict.fromkeys(
        ("device", "is_cuda", "is_cpu", "get_device"), "the device is read; an epilogue is the same on each"
    ),
    **dict.fromkeys(
        ("no_grad", "enable_grad", "set_grad_enabled", "inference_mode"),
        "{name} is not supported; tensor.detach() ends a derivative",
    ),
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


@dataclass(frozen=True)
class _Captured:
    """One captured value, of a cell or a module's global: its name, what it was and how to see what it is now."""

    name: str
    value: object
    now: Callable[[], object]


@dataclass(frozen=True)
class Captures:
    """What a function and the functions that it calls have captured.

    Args:
        function: the decorated one.
        codes: of it and of the user's functions that it calls.
        values: what they read from around them.
    """

    function: FunctionType
    codes: tuple[tuple[FunctionType, CodeType], ...]
    values: tuple[_Captured, ...]

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


def captures_of(function: FunctionType) -> Captures:
    """What `function` has captured.

    Raises:
        TypeError: for a value that may change unseen, such as a list or an instance.
        NotImplementedError: for a tensor, and where the device is read or gradients are switched off.
    """
    codes: list[tuple[FunctionType, CodeType]] = []
    values: list[_Captured] = []
    waiting: list[FunctionType] = [function]
    while waiting:
        current = waiting.pop()
        if any(known is current for known, _ in codes):
            continue
        codes.append((current, current.__code__))
        _check_attributes(function, current)
        for captured in _reads(current):
            value = captured.value
            values.append(captured)
            if isinstance(value, FunctionType):
                if is_users(value.__code__.co_filename):
                    waiting.append(value)
            else:
                _check(function, current, captured.name, value)
    return Captures(function, tuple(codes), tuple(values))


def _reads(function: FunctionType) -> list[_Captured]:
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found.append(_Captured(name, _contents(cell), functools.partial(_contents, cell)))
    names = {
        instruction.argval
        for code in _code_objects(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for name in sorted(names):
        if name in function.__globals__:
            now = functools.partial(function.__globals__.get, name, _MISSING)
            found.append(_Captured(name, now(), now))
    return found


def _check_attributes(function: FunctionType, reader: FunctionType) -> None:
    for code in _code_objects(reader.__code__):
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            if isinstance(instruction.starts_line, int) and not isinstance(instruction.starts_line, bool):
                line = instruction.starts_line
            line = getattr(instruction, "line_number", None) or line  # from Python 3.13 on
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _REFUSED:
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
    if value is _MISSING or _is_constant(value) or isinstance(value, _FIXED):
        return
    if callable(value) and type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return
    raise TypeError(
        f"{place}: {name!r} is captured, and a {type(value).__name__} may change unseen; captured are numbers, "
        "strings, tuples of them, modules and functions; numbers become constants of the epilogue"
    )
