"""From a graph to a Python function."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from itertools import count
from typing import Any

from torch.fx import Graph

_numbers = count()


def function(graph: Graph, name: str) -> Callable[..., Any]:
    """A function of the graph's placeholders; it takes the module that targets belong to as its first argument, if any.

    Args:
        graph: the graph.
        name: what tracebacks call the function's file.
    """
    code = graph.python_code(root_module="self")
    file = f"<epigemm {next(_numbers)}: {name}>"
    # Tracebacks find the generated lines there.
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, file, "exec"), scope)  # noqa: S102: fx's own way of making a graph a function
    return scope["forward"]  # type: ignore[no-any-return]
