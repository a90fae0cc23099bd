"""What a trace took for granted, as code that looks whether it still holds.

A guard runs at every call, so it is generated: one function for what was read of modules, and one for each function
whose globals and closure were read, which runs in that very scope.
"""

from __future__ import annotations

import keyword
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.fusion import codegen
from epigemm.fusion.audit import Function
from epigemm.fusion.shadows import Path, Reads
from epigemm.fusion.state import has_global_hooks, is_torch_patched, original_class, why_not_callable
from epigemm.fusion.values import is_constant, same

_is_compiling = torch.compiler.is_compiling
_HOLDS = -1


@dataclass(frozen=True)
class _Claim:
    """One thing that must still hold: the condition under which it does not, and how to say so."""

    condition: str
    text: str
    reads: tuple[Path, str, Any] | None = None

    def describe(self, module: nn.Module) -> str:
        """What has changed."""
        if self.reads is None or _is_compiling():
            return self.text or "what it read has changed"
        path, name, was = self.reads
        now = getattr(descend(module, path), name, None)
        if is_constant(was) and is_constant(now):
            return f"{'.'.join((*path, name))} is {now!r}, it was {was!r}"
        return f"{'.'.join((*path, name))} has changed"


@dataclass(frozen=True)
class Quiet:
    """A module that must go on assigning nothing, for something is read after it was called.

    Attributes:
        path: where it is.
        kind: its class.
        names: of its children.
        guard: of its forward's trace; None for torch's own.
    """

    path: Path
    kind: type
    names: list[str]
    guard: Guard | None

    def may_assign(self, module: nn.Module) -> bool:
        """Whether what stands there now is another module, or runs more than the forward that was looked at."""
        part = descend(module, self.path)
        if part is None or original_class(type(part)) is not self.kind or why_not_callable(part):
            return True
        if [*part._modules] != self.names:
            return True
        return self.guard is not None and self.guard.why_broken(part) != ""


class Guard:
    """What must still hold of a module for its trace to be its forward."""

    def __init__(self, reads: list[Reads], functions: list[Function], quiet: Sequence[Quiet] = ()) -> None:
        self._quiet = tuple(quiet)
        self._claims, self._state = _state_check(reads)
        self._names = [_names_check(function) for function in functions if function.names]
        self._codes = [_code_of(function.function) for function in functions]
        self._inlines = any(read.inlined for read in reads)
        self._reads_training = any("training" in read.values for read in reads)

    def reads_training(self) -> bool:
        """Whether the forward asked for the mode."""
        return self._reads_training

    def why_broken(self, module: nn.Module) -> str:
        """What has changed since the trace; empty where nothing has."""
        try:
            found = self._state(module)
            if found != _HOLDS:
                return self._claims[found].describe(module)
            for names, check in self._names:
                found = check()
                if found != _HOLDS:
                    return f"the global {names[found]} has changed"
            for part in self._quiet:
                if part.may_assign(module):
                    return f"{'.'.join(part.path)} might assign what is read after it"
        except (AttributeError, NameError, KeyError):
            return "something that it read is gone"
        if not _is_compiling():
            if (self._inlines or self._quiet) and has_global_hooks():
                return "there are global module hooks"
            if is_torch_patched():
                return "a function that torch's layers call was replaced"
            for function, code, defaults, keyword_defaults in self._codes:
                if (
                    function.__code__ is not code
                    or function.__defaults__ is not defaults
                    or (
                        function.__kwdefaults__ is not keyword_defaults
                        and not same(function.__kwdefaults__, keyword_defaults)
                    )
                ):
                    return f"{function.__name__} has changed"
        return ""


def descend(module: nn.Module, path: Path) -> Any:
    """The submodule at a path; None where there is none."""
    found: Any = module
    for name in path:
        found = None if found is None else found._modules.get(name)
    return found


def _code_of(function: types.FunctionType) -> tuple[Any, ...]:
    keyword_defaults = function.__kwdefaults__  # a dict that can be written
    return (
        function,
        function.__code__,
        function.__defaults__,
        None if keyword_defaults is None else dict(keyword_defaults),
    )


# --- modules ----------------------------------------------------------------------------------------------------------


def _state_check(reads: list[Reads]) -> tuple[list[_Claim], Callable[[nn.Module], int]]:
    writer = _Writer()
    writer.write(sorted(reads, key=lambda read: len(read.path)))
    return writer.claims, writer.function()


class _Writer:
    """Writes `holds(module)`, which gives the number of the first claim that does not hold."""

    def __init__(self) -> None:
        self.claims: list[_Claim] = []
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {
            "same": same,
            "original_class": original_class,
            "why_not_callable": why_not_callable,
            "Tensor": Tensor,
        }
        self._variables: dict[Path, str] = {(): "module"}

    def write(self, reads: list[Reads]) -> None:
        """All claims, those of outer modules first."""
        needed = {read.path[:end] for read in reads if _is_asked(read) for end in range(len(read.path) + 1)}
        for read in reads:
            if read.path in needed:
                if read.path:
                    self._write_child(read.path)
                for claim in self._claims_of(read, self._variables[read.path], needed):
                    self._claim(claim)

    def function(self) -> Callable[[nn.Module], int]:
        """The function."""
        body = "\n".join(f"    {line}" for line in [*self._lines, f"return {_HOLDS}"])
        return codegen.compiled(f"def holds(module):\n{body}\n", "holds", "guard", self._constants)

    def _write_child(self, path: Path) -> None:
        outer, name = self._variables[path[:-1]], f"m{len(self._variables)}"
        self._variables[path] = name
        self._lines.append(f"{name} = {outer}._modules.get({path[-1]!r})")
        self._claim(_Claim(f"{name} is None", f"{'.'.join(path)} is gone"))

    def _claim(self, claim: _Claim) -> None:
        self._lines.append(f"if {claim.condition}: return {len(self.claims)}")
        self.claims.append(claim)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _claims_of(self, read: Reads, module: str, needed: set[Path]) -> Iterator[_Claim]:
        place = ".".join(read.path)
        if read.kind is not None and read.path:
            condition = f"original_class(type({module})) is not {self._constant(read.kind)}"
            yield _Claim(condition, f"the class of {place} has changed")
        if (read.inlined or read.names is not None) and read.path:
            # The graph finds it by its name, which may be a property or a plain attribute by now.
            outer = self._variables[read.path[:-1]]
            yield _Claim(f"{_attribute(outer, read.path[-1])} is not {module}", f"{place} was replaced")
        if read.inlined:
            yield _Claim(f"why_not_callable({module})", f"{place} has hooks or a forward of its own")
        for kind, name, value in read.statics:
            condition = f"{self._constant(kind)}.{name} is not {self._constant(value)}"
            yield _Claim(condition, f"{kind.__name__}.{name} has changed")
        yield from self._claims_of_children(read, module, place, needed)
        yield from self._claims_of_attributes(read, module, place)

    def _claims_of_children(
        self, read: Reads, module: str, place: str, needed: set[Path]
    ) -> Iterator[_Claim]:
        present = read.present
        if read.names is not None:
            text = f"the children of {place or 'the module'} have changed"
            children = f"{module}._modules"
            yield _Claim(f"[*{children}] != {self._constant(read.names)}", text)
            if set(read.leaves) == set(read.names):
                kinds = self._constant([read.leaves[name] for name in read.names])
                yield _Claim(f"[*map(type, {children}.values())] != {kinds}", text)
                present = set()
            elif present == set(read.names):
                yield _Claim(f"None in {children}.values()", text)
                present = set()
        leaves = read.leaves if present else {}
        for name, kind in leaves.items():
            condition = f"type({module}._modules.get({name!r})) is not {self._constant(kind)}"
            yield _Claim(condition, f"{'.'.join((*read.path, name))} is no {kind.__name__} any more")
        for name in sorted(present - set(leaves)):
            if (*read.path, name) not in needed:
                condition = f"{module}._modules.get({name!r}) is None"
                yield _Claim(condition, f"{'.'.join((*read.path, name))} is gone")

    def _claims_of_attributes(self, read: Reads, module: str, place: str) -> Iterator[_Claim]:
        for name in sorted(read.absent):
            yield _Claim(f"{_attribute(module, name)} is not None", _changed(place, name))
        for name in sorted(read.tensors):
            # The replicas of nn.DataParallel have plain attributes for parameters.
            registered = [
                f"{module}.{tensors}.get({name!r}) is None" for tensors in ("_parameters", "_buffers")
            ]
            plain = f"not isinstance(getattr({module}, {name!r}, None), Tensor)"
            yield _Claim(" and ".join((*registered, plain)), f"{_changed(place, name)}: it is no tensor")
        for name, value in read.values.items():
            constant = self._constant(value)
            if not name:
                yield _Claim(f"{module} is not {constant}", f"{place} was replaced")
                continue
            now = _attribute(module, name)
            condition = f"not same({now}, {constant})"
            if is_constant(value):  # the same object is the same value, and that is found faster
                condition = f"{now} is not {constant} and {condition}"
            yield _Claim(condition, "", (read.path, name, value))
        for name, value in read.methods.items():
            method = f"{_attribute(module, name)}.__func__"
            yield _Claim(f"{method} is not {self._constant(value)}", _changed(place, name))


def _attribute(module: str, name: str) -> str:
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{module}.{name}" if plain else f"getattr({module}, {name!r})"


def _changed(place: str, name: str) -> str:
    return f"{place}.{name} has changed" if place else f"{name} has changed"


def _is_asked(read: Reads) -> bool:
    """Whether a place has claims of its own."""
    named = read.names, read.kind, read.inlined or None
    asked = read.present, read.absent, read.tensors, read.values, read.methods, read.statics
    return any(value is not None for value in named) or any(asked)


# --- names ------------------------------------------------------------------------------------------------------------


def _names_check(audited: Function) -> tuple[list[str], Callable[[], int]]:
    """The names, and a function in the scope of the audited one that gives the number of the first that changed."""
    function = audited.function
    scope = function.__globals__
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    names = list(dict(audited.names))
    values = tuple(dict(audited.names).values())
    own = {
        "_epigemm_same": types.CellType(same),
        "_epigemm_values": types.CellType(values),
        "_epigemm_scope": types.CellType(scope),
    }
    importable = getattr(sys.modules.get(scope.get("__name__", "")), "__dict__", None) is scope
    lines: list[str] = []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        first, *rest = name.split(".")
        if not importable and first in scope and first not in cells:
            # torch.compile looks globals up in the module of that name, and stumbles where there is none.
            name = ".".join((f"_epigemm_scope[{first!r}]", *rest))
        condition = f"{name} is not _epigemm_values[{index}]"
        if is_constant(value):
            condition = f"{condition} and not _epigemm_same({name}, _epigemm_values[{index}])"
        lines.append(f"        if {condition}: return {index}")
    parameters = ", ".join((*(name for name in cells if name != "__class__"), *own))
    body = "\n".join((*lines, f"        return {_HOLDS}"))
    source = f"def around({parameters}):\n    def holds():\n{body}\n    return holds\n"
    code = codegen.inner_code(source, "guard of names")
    closure = tuple(own.get(name) or cells[name] for name in code.co_freevars)
    return names, types.FunctionType(code, scope, "holds", None, closure)
