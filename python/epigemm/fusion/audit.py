"""What the code of a forward may do and read, so that a trace of it stays true.

A trace holds for every later call only if nothing else than the inputs and watched values decide what the forward
does. So its bytecode, and that of every function it calls, may hold nothing but what is listed here: each name must
stand for a value that can be watched (`admissible`), and no instruction may write what outlives the call.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from epigemm.fusion import allowed
from epigemm.fusion.values import is_constant

_HAS_ATTRIBUTES = "has attributes of its own"


class Untraceable(Exception):
    """A forward that cannot become a graph, and why."""


@dataclass(frozen=True)
class NoneTest:
    """`name.attributes is None` on an argument of a function that is not assigned; `name` is empty for all others."""

    name: str
    attributes: tuple[str, ...] = ()
    constant: Any = None


@dataclass
class Function:
    """An audited function.

    Attributes:
        function: itself.
        names: (expression, value) for everything that it reads from its globals and its closure.
    """

    function: types.FunctionType
    names: list[tuple[str, Any]] = field(default_factory=list)


class Audit:
    """The functions that one trace runs."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.asks_for_types = False
        self._expected: dict[int, list[types.FunctionType]] = {}
        self._done: dict[int, types.CodeType] = {}
        self._torch: dict[int, Any] = {}
        self._tests: dict[int, list[NoneTest]] = {}
        self._super: dict[int, list[str]] = {}

    def admit(self, value: Any) -> None:
        """Let a forward call this function; its code is looked at when it does."""
        code = getattr(value, "__code__", None)
        if code is None:
            return
        if allowed.is_pure_function(value) and value is not typing.cast:
            self._torch[id(code)] = value
            return
        if allowed.is_of_torch(code):
            return
        if vars(value):  # they could be read without calling it
            raise Untraceable(f"{value.__qualname__} {_HAS_ATTRIBUTES}: {', '.join(vars(value))}")
        known = self._expected.setdefault(id(code), [])
        if not any(value is other for other in known):
            known.append(value)
            if id(code) in self._done:
                self._check(value)

    def is_done(self, code: types.CodeType) -> bool:
        """Whether the code has been looked at."""
        return id(code) in self._done

    def enter(self, code: types.CodeType) -> bool:
        """Look at code that is about to run; False: nobody knows where it comes from."""
        if id(code) in self._done or id(code) in self._torch:
            return True
        if id(code) not in self._expected:
            return False
        for function in self._expected[id(code)]:
            self._check(function)
        return True

    def expects(self, code: types.CodeType) -> bool:
        """Whether the code is that of a function that was admitted."""
        return id(code) in self._expected

    def tests(self, code: types.CodeType) -> list[NoneTest]:
        """The comparisons with None in a piece of code."""
        return self._tests.get(id(code), [])

    def inherited(self, code: types.CodeType) -> list[str]:
        """What a piece of code reads through `super()`."""
        return self._super.get(id(code), [])

    def _check(self, function: types.FunctionType) -> None:
        check_signature(function)
        audited = Function(function)
        self.functions.append(audited)
        self._check_code(audited, function.__code__)

    def _check_code(self, audited: Function, code: types.CodeType) -> None:
        self._done[id(code)] = code
        reader = _Reader(audited, code)
        reader.read()
        self.asks_for_types |= reader.asks_for_types
        self._tests[id(code)], self._super[id(code)] = reader.tests, reader.inherited
        for value in reader.admitted:
            self.admit(value)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._check_code(audited, constant)


def check_signature(function: types.FunctionType) -> None:
    """Untraceable where a function is more than its code."""
    name = function.__qualname__
    if hasattr(function, "__wrapped__"):
        raise Untraceable(f"{name} is wrapped by a decorator")
    if vars(function):
        raise Untraceable(f"{name} {_HAS_ATTRIBUTES}: {', '.join(vars(function))}")
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(is_constant(value) for value in defaults):
        raise Untraceable(f"{name} has defaults that are neither numbers nor strings nor None")


class _Reader:
    """One piece of code, instruction by instruction."""

    def __init__(self, audited: Function, code: types.CodeType) -> None:
        self.tests: list[NoneTest] = []
        self.inherited: list[str] = []
        self.admitted: list[Any] = []
        self.asks_for_types = False
        self._audited, self._code = audited, code
        self._function = audited.function
        self._all = [
            i for i in dis.get_instructions(code) if i.opname not in ("EXTENDED_ARG", "CACHE", "NOP")
        ]
        self._classes: set[int] = set()
        self._cells = dict(
            zip(self._function.__code__.co_freevars, self._function.__closure__ or (), strict=True)
        )

    def read(self) -> None:
        """Untraceable where something is not on the lists."""
        flags = self._code.co_flags
        generates = flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR)
        if generates and self._code.co_name != "<genexpr>":
            raise self._refusal("is a generator or a coroutine")
        for index, instruction in enumerate(self._all):
            self._check_instruction(index, instruction)
        for index, instruction in enumerate(self._all):
            if self._is_outside(instruction):
                self._check_name(index)

    def _refusal(self, what: str) -> Untraceable:
        name = self._function.__name__
        inside = "" if self._code is self._function.__code__ else f" ({self._code.co_name})"
        return Untraceable(f"{name}{inside} {what}")

    def _check_instruction(self, index: int, instruction: dis.Instruction) -> None:
        name, value = instruction.opname, instruction.argval
        if name in allowed.REFUSED:
            what = value if name.endswith(("ATTR", "GLOBAL", "NAME")) else ""
            raise self._refusal(f"{allowed.REFUSED[name]} {what}".rstrip())
        if (
            name not in allowed.INSTRUCTIONS
            and name not in allowed.CALLS
            and not name.startswith(allowed.FAMILIES)
        ):
            raise self._refusal(f"has an instruction that is not known to be safe: {name}")
        if name == "CALL_INTRINSIC_1" and instruction.arg not in allowed.INTRINSICS:
            raise self._refusal(f"has an instruction that is not known to be safe: {instruction.argrepr}")
        if name == "STORE_DEREF" and value in self._cells:
            raise self._refusal(f"assigns {value} of the function around it")
        if name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") and allowed.is_dunder(value):
            raise self._refusal(f"reads the attribute {value}")
        if name == "LOAD_SUPER_ATTR":
            self.inherited.append(value)
        if name == "IS_OP" or (name.startswith("POP_JUMP") and name.endswith("NONE")):
            self._add_test(index)

    # --- names ---

    def _is_outside(self, instruction: dis.Instruction) -> bool:
        """Whether an instruction loads what neither an argument nor a local holds."""
        if instruction.opname == "LOAD_GLOBAL":
            return True
        return instruction.opname == "LOAD_DEREF" and instruction.argval in self._cells

    def _resolve(self, index: int) -> tuple[str, Any, int]:
        """The expression that begins here, what it stands for now, and where it ends."""
        name = str(self._all[index].argval)
        value = self._find(index, name)
        end = index + 1
        while isinstance(value, types.ModuleType) and end < len(self._all):
            following = self._all[end]
            if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            attribute = str(following.argval)
            if type(value) is not types.ModuleType or attribute not in vars(value):
                raise self._refusal(f"reads the global {name}.{attribute}")
            name, value, end = f"{name}.{attribute}", vars(value)[attribute], end + 1
        return name, allowed.original(value), end

    def _find(self, index: int, name: str) -> Any:
        if self._all[index].opname == "LOAD_DEREF":
            try:
                return self._cells[name].cell_contents
            except ValueError:
                raise self._refusal(f"reads {name} before it is assigned") from None
        scope = self._function.__globals__
        if name in scope:
            return scope[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise self._refusal(f"reads the global {name}, which does not exist")

    def _check_name(self, index: int) -> None:
        if self._all[index].argval == "__class__" and self._loads(index - 1, super):
            return
        name, value, end = self._resolve(index)
        self._require(value, name, index, end)
        self._audited.names.append((name, value))
        self.admitted.append(value)

    def _loads(self, index: int, value: Any) -> bool:
        return index >= 0 and self._is_outside(self._all[index]) and self._resolve(index)[1] is value

    def _require(self, value: Any, name: str, index: int, end: int) -> None:
        if value is isinstance:
            self._allow_classes_of_isinstance(end)
        elif value is super:
            self._check_super(end)
        elif value is typing.cast:
            self._allow_classes(end, "BINARY_SUBSCR", "BINARY_OP", "BUILD_TUPLE")
        elif value is getattr:
            self._check_getattr(end)
        elif isinstance(value, type) and value not in allowed.BUILTINS:
            self._require_class(value, name, index)
        elif not allowed.is_admissible(value):
            kind = type(value).__name__
            raise self._refusal(f"reads the global {name}, a {kind} that cannot be watched")

    def _require_class(self, value: type, name: str, index: int) -> None:
        if index not in self._classes and not issubclass(value, BaseException):
            raise self._refusal(f"reads the global {name}, a class")

    def _allow_classes(self, start: int, *joining: str) -> int:
        """Names from here on may stand for classes; returns where such names end."""
        end = start
        while end < len(self._all):
            instruction = self._all[end]
            if self._is_outside(instruction):
                self._classes.add(end)
            elif instruction.opname not in ("LOAD_ATTR", *joining):
                break
            end += 1
        return end

    def _allow_classes_of_isinstance(self, end: int) -> None:
        """`isinstance(value, classes)` and no other use of it."""
        self.asks_for_types = True
        end = self._skip(end, "PUSH_NULL")
        start = end
        while end < len(self._all) and self._is_local(self._all[end]):
            end += 1
        if end > start:
            end = self._allow_classes(end, "BUILD_TUPLE", "BINARY_OP", "BINARY_OR")
            end = self._skip(end, "PRECALL")
            if end < len(self._all) and self._all[end].opname in allowed.CALLS and self._all[end].arg == 2:
                return
        raise self._refusal("uses isinstance in a way that cannot be followed")

    def _is_local(self, instruction: dis.Instruction) -> bool:
        name = instruction.opname
        local = name.startswith("LOAD_FAST") or (name == "LOAD_DEREF" and not self._is_outside(instruction))
        return local or name == "LOAD_ATTR"

    def _check_super(self, end: int) -> None:
        end = self._skip(end, "PUSH_NULL")
        following = self._all[end : end + 3]
        names = [instruction.opname for instruction in following]
        if names[2:] == ["LOAD_SUPER_ATTR"] and following[0].argval == "__class__":
            return
        end = self._skip(end, "PRECALL")
        call, attribute = self._all[end : end + 2]
        if call.opname in allowed.CALLS and not call.arg and attribute.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            self.inherited.append(str(attribute.argval))
            return
        raise self._refusal("uses super in another way than super().name")

    def _check_getattr(self, end: int) -> None:
        """`getattr(value, "name")`: as good as `value.name`."""
        end = self._skip(end, "PUSH_NULL")
        value, name, *call = self._all[end : end + 4]
        calls = [i for i in call if i.opname != "PRECALL"][:1]
        plain = self._is_local(value) and name.opname == "LOAD_CONST" and isinstance(name.argval, str)
        if not (plain and calls and calls[0].opname in allowed.CALLS and calls[0].arg == 2):
            raise self._refusal("reads the global getattr")
        if allowed.is_dunder(name.argval):
            raise self._refusal(f"reads the attribute {name.argval}")

    def _skip(self, index: int, name: str) -> int:
        return index + (index < len(self._all) and self._all[index].opname == name)

    # --- comparisons by identity ---

    def _add_test(self, index: int) -> None:
        constant = None
        end = index
        if self._all[index].opname == "IS_OP":
            before = self._all[index - 1]
            if before.opname == "LOAD_COMMON_CONSTANT":
                return  # Python 3.14 looks whether `all` is still the builtin before it calls it
            if before.opname != "LOAD_CONST" or before.argval not in (None, True, False):
                raise self._refusal("compares with `is` to something else than None, True or False")
            constant, end = before.argval, index - 1
        test = self._operand(index, end)
        if test is None:
            return
        self.tests.append(NoneTest(test.name, test.attributes, constant))

    def _operand(self, index: int, end: int) -> NoneTest | None:
        attributes: list[str] = []
        start = end - 1
        while start > 0 and self._all[start].opname == "LOAD_ATTR":
            attributes.insert(0, str(self._all[start].argval))
            start -= 1
        if any(instruction.is_jump_target for instruction in self._all[start + 1 : index + 1]):
            return NoneTest("")
        first = self._all[start]
        if self._is_outside(first):
            return None  # what it may stand for is watched
        name = _last_name(first)
        if first.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and name in self._constant_arguments():
            return NoneTest(name, tuple(attributes))
        return NoneTest("")

    def _constant_arguments(self) -> set[str]:
        code = self._code
        count = code.co_argcount + code.co_kwonlyargcount
        stored: set[str] = set()
        for instruction in self._all:
            if instruction.opname.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_FAST")):
                value = instruction.argval
                stored.update(value if isinstance(value, tuple) else (value,))
        return set(code.co_varnames[:count]) - stored


def _last_name(instruction: dis.Instruction) -> str:
    """The name that a load, or a pair of loads, leaves on top of the stack."""
    value = instruction.argval
    return str(value[-1] if isinstance(value, tuple) else value)


def functions_of_class(kind: type) -> Iterator[types.FunctionType]:
    """Everything that people wrote into a class and its ancestors."""
    for ancestor in kind.__mro__:
        for value in vars(ancestor).values():
            for part in (getattr(value, "__func__", value), *_accessors(value)):
                if isinstance(part, types.FunctionType) and not allowed.is_of_torch(part.__code__):
                    yield part


def _accessors(value: Any) -> tuple[Callable[..., Any] | None, ...]:
    return (value.fget, value.fset, value.fdel) if isinstance(value, property) else ()
