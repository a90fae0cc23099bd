"""From text and graphs to Python functions."""

from __future__ import annotations

import linecache
import math
import operator
import types
from collections.abc import Callable
from itertools import count
from typing import Any

from torch.fx import Graph
from torch.fx.graph import PythonCode
from torch.fx.node import map_aggregate

from epigemm.fusion.operations import AUGMENTED, hashable

_numbers = count()
_NAMES_OF_FX = {"self", "inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree"}


def function(graph: Graph, name: str) -> Callable[..., Any]:
    """A function of the graph's placeholders; it takes the module that targets belong to as its first argument, if any.

    Args:
        graph: the graph.
        name: what tracebacks call the function's file.

    Raises:
        ValueError: it holds what fx writes as something else.
        SyntaxError: it holds names that are keywords.
    """
    return of_code(code_of(graph), name)


def code_of(graph: Graph) -> PythonCode:
    """The same as text."""
    _require_printable(graph)
    return text_of(graph)


def text_of(graph: Graph) -> PythonCode:
    """The text of a graph; nodes of it that are augmented assignments become calls of `_ASSIGNMENTS`."""
    for node in graph.nodes:
        if node.op == "call_function" and hashable(node.target):
            node.target = _ASSIGNMENTS.get(node.target, node.target)
    return graph.python_code(root_module="self")


def of_code(code: PythonCode, name: str) -> Callable[..., Any]:
    """The function of a graph's text."""
    return compiled(code.src, "forward", name, dict(code.globals))


def _require_printable(graph: Graph) -> None:
    """ValueError where the text that fx writes would not mean the graph: `-2.0 ** x` for a power of -2.0, say."""
    for node in graph.nodes:
        if node.op == "placeholder" and node.target in _NAMES_OF_FX:
            raise ValueError(f"an argument is called {node.target}")
        base = node.args[0] if node.target is operator.pow else None
        if isinstance(base, (int, float)) and str(base).startswith("-"):
            raise ValueError(f"a power of {base}")
        map_aggregate((node.args, node.kwargs), _require_exact)


def _require_exact(value: Any) -> Any:
    if type(value) is complex:
        parts = value.real, value.imag
        if not all(math.isfinite(part) and (part or math.copysign(1.0, part) > 0) for part in parts):
            raise ValueError(f"the number {value}")
    return value


def compiled(source: str, name: str, title: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function `name` that the source defines.

    Args:
        source: Python.
        name: of the function.
        title: what tracebacks call its file.
        scope: its globals.
    """
    exec(_compiled(source, title), scope)  # fx makes a graph a function in the same way
    return scope[name]  # type: ignore[no-any-return]


def inner_code(source: str, title: str) -> types.CodeType:
    """The code of the function inside the one function that the source defines, to be given a closure."""
    outer = next(part for part in _compiled(source, title).co_consts if isinstance(part, types.CodeType))
    return next(part for part in outer.co_consts if isinstance(part, types.CodeType))


def own_code(made: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with code of its own: torch.compile counts what it compiled by code, and gives up at eight."""
    assert isinstance(made, types.FunctionType)
    made.__code__ = made.__code__.replace(co_name=made.__code__.co_name)
    return made


def _assignment(name: str, sign: str) -> Callable[..., Any]:
    source = f"def {name}(a, b):\n    a {sign} b\n    return a\n"
    return compiled(source, name, f"a {sign} b", {"__name__": __name__})


def _compiled(source: str, title: str) -> types.CodeType:
    file = f"<epigemm {next(_numbers)}: {title}>"
    # Tracebacks find the generated lines there.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


# fx writes `a += b; c = a`: where a is a number or a tuple, it is another one for whoever reads it later. A function
# has an `a` of its own.
_ASSIGNMENTS: dict[Any, Callable[..., Any]] = {
    getattr(operator, name): _assignment(name, sign) for name, sign in AUGMENTED.items()
}
