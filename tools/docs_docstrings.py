"""What the API page says of a function that has its arguments, results and errors from `epigemm.docstrings`.

Griffe reads the sources and imports nothing, so that it sees no docstring that is completed at import. This completes
it in the same way. Griffe shows a section "Examples" as code, and any other that it does not know as a note. Options
that a function takes as `**options: Unpack[...]` become parameters with types.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

griffe: Any = importlib.import_module("griffe")

_SOURCE = Path(__file__).parents[1] / "python" / "epigemm" / "docstrings.py"
_PREFIX = "docstrings."
_UNPACKED = re.compile(r"Unpack\[(\w+)\]")


def _load() -> ModuleType:
    """`epigemm.docstrings` alone: the package needs torch."""
    spec = importlib.util.spec_from_file_location("docstrings", _SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """The docstrings and signatures of a package, complete."""

    def __init__(self) -> None:
        super().__init__()
        self._complete = _load()

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Complete a docstring."""
        if obj.docstring is None:
            return
        for decorator in getattr(obj, "decorators", ()):
            name = str(decorator.value)
            if name.startswith(_PREFIX):
                function = getattr(self._complete, name.removeprefix(_PREFIX))
                obj.docstring.value = function(_with_signature(obj)).__doc__
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = re.sub(
            r"\n\nImports: .*", "", text, flags=re.DOTALL
        )  # for who reads the source

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Complete the signatures, when all that they name is known."""
        for function in _functions(pkg):
            for parameter in list(function.parameters):
                if found := _UNPACKED.fullmatch(str(parameter.annotation)):
                    del function.parameters[parameter.name]
                    for field in function.module[found[1]].attributes.values():
                        function.parameters.add(_option(field))


def _functions(parent: Any) -> Iterator[Any]:
    """All functions of a module or class, and of what is in it."""
    for member in parent.members.values():
        if member.is_alias:
            continue
        if member.is_function:
            yield member
        elif member.is_module or member.is_class:
            yield from _functions(member)


def _option(field: Any) -> Any:
    """A field of a TypedDict as a parameter that may be left out."""
    kind = griffe.ParameterKind.keyword_only
    return griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default="...")


def _with_signature(obj: Any) -> Any:
    """A function with the names and defaults that Griffe found, and the docstring."""

    def stand_in() -> None: ...

    found = [parameter for parameter in obj.parameters if parameter.name not in ("self", "options")]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(each.name, kind, default=_value(each.default)) for each in found]
    stand_in.__doc__ = obj.docstring.value
    vars(stand_in)["__signature__"] = inspect.Signature(parameters)
    return stand_in


def _value(default: object) -> object:
    """A default as a value, or its text."""
    try:
        return ast.literal_eval(str(default))
    except (SyntaxError, ValueError):
        return str(default)
