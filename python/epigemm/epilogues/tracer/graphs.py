"""Traces a function to a graph, in its own thread alone.

`make_fx` ends in `torch.fx.Tracer.trace`. While that runs, methods of `torch.nn.Module` are replaced for all threads,
and a flag is set at which Dynamo refuses the calls of all compiled functions; torch 2.10 has one table of
decompositions for all threads, too. Dynamo has a lock against that. To take it here could wait for ever: a module with
epilogues may be imported in one thread while a compilation imports it in another one. Functions of tensors need none of
it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.epilogues.tracer.steps import KEPT


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


# --- decompositions of operators without a primitive: torch's core ATen ones, and a few of our own --------------------


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """By overload."""
    # They take seconds to import, so only at the first decoration.
    from torch._decomp import core_aten_decompositions
    from torch._decomp.decompositions import sym_numel

    aten = torch.ops.aten
    core: Any = core_aten_decompositions()
    table = {
        overload: function
        for overload, function in core.items()
        if overload._schema.name.split("::")[-1] not in KEPT
    }
    ours: dict[Any, Callable[..., Tensor]] = {
        aten.mish.default: lambda x: aten.mul(x, aten.tanh(aten.softplus(x))),
        aten.hardsigmoid.default: lambda x: aten.div(aten.hardtanh(aten.add(x, 3.0), 0.0, 6.0), 6.0),
        aten.hardswish.default: lambda x: aten.div(
            aten.mul(x, aten.hardtanh(aten.add(x, 3.0), 0.0, 6.0)), 6.0
        ),
        aten.celu.default: lambda x, alpha=1.0: aten.elu(x, alpha, 1.0, 1.0 / alpha),
        aten.lerp.Scalar: _lerp,
        aten.logit.default: _logit,
        aten.special_xlog1py.default: _xlog1py,
        aten.smooth_l1_loss.default: _smooth_l1_loss,
        aten.huber_loss.default: _huber_loss,
    }
    table |= {overload: _rounded_once(function) for overload, function in ours.items()}
    table[aten.sym_numel.default] = sym_numel  # as `make_fx` has it
    xlog1py = aten.special_xlog1py
    table[xlog1py.other_scalar] = lambda a, b: xlog1py(a, aten.full_like(a, b))
    table[xlog1py.self_scalar] = lambda a, b: xlog1py(aten.full_like(b, a), b)
    # These would read a number that is a symbol. As a factor of a tensor of ones it is not read.
    for overload in (aten.scalar_tensor.default, aten.full.default, aten.full_like.default):
        table[overload] = functools.partial(_fill, overload, table.get(overload))
    return table


def _rounded_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For tensors of 16 bits: computed in fp32 and rounded at the end, as torch's kernels do."""

    def wide(*args: Any) -> Tensor:
        dtype = args[0].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return function(*args)
        to = torch.ops.aten._to_copy
        given = [to(each, dtype=torch.float32) if isinstance(each, Tensor) else each for each in args]
        return to(function(*given), dtype=dtype)  # type: ignore[no-any-return]

    return wide


def _fill(overload: Any, decomposition: Any, *args: Any, **kwargs: Any) -> Any:
    place = 0 if overload is torch.ops.aten.scalar_tensor.default else 1
    if isinstance(args[place], torch.SymFloat):
        ones = overload(*args[:place], 1.0, *args[place + 1 :], **kwargs)
        filled = torch.ops.aten.mul.Tensor(ones, args[place])
        same = filled.dtype == ones.dtype
        return filled if same else torch.ops.aten._to_copy(filled, dtype=ones.dtype)
    return NotImplemented if decomposition is None else decomposition(*args, **kwargs)


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """`lerp`, computed from the nearer end, as torch does."""
    aten = torch.ops.aten
    way = aten.sub(end, start)
    near = aten.add(start, aten.mul(way, weight))
    far = aten.sub(end, aten.mul(way, 1.0 - weight))
    if not isinstance(weight, torch.SymFloat):
        return near if abs(weight) < 0.5 else far  # type: ignore[no-any-return]
    tensor = aten.mul(aten.full_like(start, 1.0), weight)
    return aten.where(aten.lt(aten.abs(tensor), 0.5), near, far)  # type: ignore[no-any-return]


# torch's own of the following have its values. Their derivatives, step by step, are not those of its formulas: at the
# ends of a domain a product of 0 and infinity is NaN, and what `where` takes for 0 has no derivative.


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)), of x between eps and 1 - eps; without eps NaN outside of [0, 1], its derivative too."""
    aten = torch.ops.aten
    if eps is not None:
        x = aten.where(aten.lt(x, eps), eps, aten.where(aten.gt(x, 1 - eps), 1 - eps, x))
    if eps:
        return aten.log(aten.div(x, aten.sub(1.0, x)))  # type: ignore[no-any-return]
    at_end = aten.logical_or(aten.eq(x, 0.0), aten.eq(x, 1.0))
    end, between = aten.where(at_end, x, 0.5), aten.where(at_end, 0.5, x)
    infinite = aten.sub(aten.log(end), aten.log1p(aten.neg(end)))
    odds = aten.where(at_end, infinite, aten.log(aten.div(between, aten.sub(1.0, between))))
    if eps is not None:
        return odds  # type: ignore[no-any-return]
    outside = aten.logical_or(aten.lt(x, 0.0), aten.gt(x, 1.0))
    nothing = aten.mul(aten.where(outside, x, 1.0), math.nan)  # of what is inside no derivative comes back
    return aten.where(outside, nothing, odds)  # type: ignore[no-any-return]


def _xlog1py(a: Tensor, b: Tensor) -> Tensor:
    """a log(1 + b), 0 where a is 0 unless b is NaN; its derivative by a is log(1 + b) there, too."""
    aten = torch.ops.aten
    is_zero = aten.eq(a, 0.0)
    # Where log(1 + b) is not finite `xlogy` has value and derivative. The other branch then gets numbers that harm no
    # sum of derivatives.
    at_end = aten.logical_and(is_zero, aten.logical_or(aten.le(b, -1.0), aten.eq(b, math.inf)))
    end = aten.xlogy(a, aten.where(at_end, aten.add(b, 1.0), 1.0))
    product = aten.mul(a, aten.log1p(aten.where(at_end, 0.0, b)))
    return aten.where(at_end, end, aten.where(is_zero, aten.add(product, 0.0), product))  # type: ignore[no-any-return]


# torch's own would square an infinite difference, and make its derivative NaN.


def _smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """d d / (2 beta) where d = abs(x - target) is less than beta, else d - beta / 2."""
    aten = torch.ops.aten
    way = aten.abs(aten.sub(x, target))
    near = aten.minimum(way, aten.full_like(way, beta))
    square = aten.div(aten.mul(aten.mul(near, near), 0.5), beta)
    return _unreduced(aten.where(aten.lt(way, beta), square, aten.sub(way, 0.5 * beta)), reduction)


def _huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """d d / 2 where d = abs(x - target) is less than delta, else delta (d - delta / 2)."""
    aten = torch.ops.aten
    way = aten.abs(aten.sub(x, target))
    near = aten.minimum(way, aten.full_like(way, delta))
    far = aten.mul(aten.sub(way, 0.5 * delta), delta)
    return _unreduced(aten.where(aten.lt(way, delta), aten.mul(aten.mul(near, near), 0.5), far), reduction)


def _unreduced(loss: Tensor, reduction: int) -> Tensor:
    """A loss for each element; a sum or a mean is refused by name."""
    aten = torch.ops.aten
    return loss if not reduction else aten.mean(loss) if reduction == 1 else aten.sum(loss)
