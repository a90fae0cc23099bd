"""Who traces the code that runs here: the only place that asks.

`torch.compiler.is_compiling` does not tell. It reads one flag for all threads, which is set while any of them compiles
or exports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

is_traced = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces this code. For Dynamo that is a constant; code that runs gets False, in every thread.

Other tracers (`make_fx`, AOTAutograd, `torch.export`) run the code under modes of their thread. The entry sees those in
C++, which Dynamo cannot run.
"""


def at_trace_time(function: _Function) -> _Function:
    """Have Dynamo run `function` and not trace it, so that its result is a constant of the graph.

    Like `torch.compiler.assume_constant_result`, which would import all of Dynamo here. Dynamo guards everything that
    these functions read: properties of arguments, torch's global state, functorch's levels.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@at_trace_time
def is_exporting() -> bool:
    """Whether this thread exports a program. torch's flag alone would be that of any thread."""
    if not torch.compiler.is_exporting():
        return False
    mode = torch._guards.detect_fake_mode()
    return mode is not None and mode.fake_tensor_converter.export


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, before which Dynamo breaks its graph: it runs at once, not when the graph runs."""
    compiler = sys.modules.get("torch._dynamo")
    return function if compiler is None else compiler.disable(function)
