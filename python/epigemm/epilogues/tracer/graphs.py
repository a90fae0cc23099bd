"""Traces a function to a graph, in its own thread alone.

`make_fx` ends in `torch.fx.Tracer.trace`. While that runs, methods of `torch.nn.Module` are replaced for all threads,
and a flag is set at which Dynamo refuses the calls of all compiled functions; torch 2.10 has one table of
decompositions for all threads, too. Dynamo has a lock against that. To take it here could wait for ever: a module with
epilogues may be imported in one thread while a compilation imports it in another one. Functions of tensors need none of
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.epilogues.tracer.decompositions import decompositions


@functools.cache
def _types() -> tuple[Any, Any]:
    """The tracer and its mode. The import takes seconds, so it comes at the first decoration."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer

    class Tracer(PythonKeyTracer):
        def trace(self, root: Callable[..., Any], concrete_args: Any = ()) -> fx.Graph:
            self.root = torch.nn.Module()
            self.graph = fx.Graph(tracer_cls=PythonKeyTracer)
            self.tensor_attrs = {}
            names = [f"arg{number}" for number in range(len(concrete_args))]
            inputs = [self.create_proxy("placeholder", name, (), {}) for name in names]
            self.create_node("output", "output", (self.create_arg(root(*inputs)),), {})
            return self.graph

    class Mode(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if decomposition := decompositions().get(func):
                with self:
                    made = decomposition(*args, **(kwargs or {}))
                if made is not NotImplemented:
                    return made
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Tracer, Mode


def traced_graph(function: Callable[..., Sequence[Tensor]], arguments: Sequence[Any]) -> fx.GraphModule:
    """The graph of a function of fake tensors and symbols, in core ATen operators."""
    from torch.fx.experimental.proxy_tensor import disable_autocast_cache, dispatch_trace, wrap_key

    tracer_type, mode_type = _types()
    tracer = tracer_type()
    with mode_type(tracer, "real"), disable_autocast_cache():
        return dispatch_trace(wrap_key(function, tuple(arguments), tracer, False), tracer, tuple(arguments))
