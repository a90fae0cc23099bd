"""What ``python -m benchmarks --host`` calls: the cases, and the ways to call each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import epigemm
from benchmarks.cases import Shape, compile_in_this_process, matching
from epigemm import Matrix, PerColumn
from epigemm.fusion.rewrite import fuse_module
from epigemm.fusion.site import Site
from epigemm.tuner.timing import Run

# The names of the variants, part of the record's format.
F_LINEAR, TORCH, EAGER, FUNCTION, PLAIN = "f_linear", "torch", "eager", "function", "function_plain"
OUT, MODULE, MODULE_EAGER, INDUCTOR, EPIGEMM = "out", "module", "module_eager", "inductor", "epigemm"
SITE = "site"
VARIANTS = {
    F_LINEAR: "F.linear with a bias, without the epilogue",
    TORCH: "one operator of PyTorch: torch.sigmoid, F.batch_norm",
    EAGER: "every operator of the formula in eager PyTorch; train_step: as a module",
    FUNCTION: "epigemm's function; fp32: at torch's default precision, on a packed weight",
    PLAIN: "the same on a plain fp32 weight",
    OUT: "the function into `out=`",
    MODULE: "epigemm's module",
    MODULE_EAGER: "a module that calls the chain",
    INDUCTOR: "torch.compile of that module",
    EPIGEMM: "torch.compile of epigemm's module",
    SITE: "the call that `fuse` writes into the graph of that module, without the graph; fp32: without a pack",
}

Runs = dict[str, Run]
_Maker = Callable[[Shape, torch.device, torch.dtype], Runs]
_SCALE = 0.5
# A layer for which a kernel of ours is planned in bf16; one that runs on fp16 slices in fp32, and is over before the
# host is; a smaller one for which PyTorch's GEMM is planned in fp32.
_LAYER, _ON_SLICES, _SMALL = Shape(64, 1024, 1024), Shape(16, 1024, 1024), Shape(16, 256, 256)
_CPU_SHAPE = Shape(8, 64, 64)
_COMPILED = "compiled/bf16"


@dataclass(frozen=True)
class HostCase:
    """One formula in one type.

    Attributes:
        name: `CASES` has them all.
        shape: M x N x K; elementwise: M x N of it.
        runs: by variant; all compute the same, but for F_LINEAR and TORCH, which may leave operators out.
        gradients: whether they are recorded.
    """

    name: str
    shape: Shape
    runs: Runs
    gradients: bool = False


def _rows(shape: Shape, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.m, shape.k or shape.n, device=device, dtype=dtype)


def _layer(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(shape.k or shape.n, shape.n, device=device, dtype=dtype)


def _site(module: nn.Module, x: Tensor, layer: nn.Linear) -> Runs:
    """Nothing where no chain is fused."""
    found: list[Callable[..., Tensor]] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., Any]:
        fuse_module(graph_module, strict=True, one_by_one=True)
        found.extend(node.target for node in graph_module.graph.nodes if isinstance(node.target, Site))
        return graph_module.forward

    # Dynamo counts the graphs of all modules of a class together.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        torch.compile(module, backend=backend)(x)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    return {SITE: lambda: found[0](x, weight, bias)} if found else {}


class _SigmoidScaleResidual(nn.Module):
    """The chain of operators as a module."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return _sigmoid_scale_residual(self.linear(x))


def _linear(
    after: Callable[[Tensor], Tensor],
    chain_of: Callable[[nn.Linear], nn.Module],
    ours: Callable[..., Tensor],
    module_of: Callable[..., nn.Module] | None = None,
    scalars: Sequence[float] = (),
) -> _Maker:
    """A layer and what follows it: as a function and, of the layer, as a module; ours as both."""

    def make(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
        x, layer = _rows(shape, device, dtype), _layer(shape, device, dtype)
        weight, bias = layer.weight.detach(), layer.bias.detach()
        given = epigemm.pack(weight) if dtype == torch.float32 else weight
        out, chain = F.linear(x, weight, bias), chain_of(layer)
        plain, own = weight.clone(), copy.deepcopy(layer)  # of a copy nothing is kept
        runs: Runs = {
            F_LINEAR: lambda: F.linear(x, weight, bias),
            EAGER: lambda: after(F.linear(x, weight, bias)),
            FUNCTION: lambda: ours(x, given, bias, *scalars),
            OUT: lambda: ours(x, given, bias, *scalars, out=out),
        }
        if module_of is not None:
            module = module_of(own, *scalars)
            runs |= {MODULE: lambda: module(x), MODULE_EAGER: lambda: chain(x)}
        if dtype == torch.float32:
            epigemm.pack(own.weight)
            runs[PLAIN] = lambda: ours(x, plain, bias, *scalars)
        return runs | _site(chain, x, layer)

    return make


def _sigmoid_scale_residual(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * _SCALE + z


@epigemm.epilogue
def _gelu(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc + bias)


@epigemm.epilogue
def _gate(acc: Tensor, bias: PerColumn, gate: Matrix) -> Tensor:
    return F.silu(acc + bias) * gate


@epigemm.epilogue
def _two(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    return torch.relu(acc + bias), acc + bias


def _call(
    ours: Callable[..., Any],
    eager: Callable[..., Any],
    *,
    offset: int = 0,
    operands: int = 0,
    halves: bool = False,
    autocast: bool = False,
    recorded: bool = False,
) -> _Maker:
    """A function of x, the weight, the bias and matrices, beside the operators that it replaces.

    Args:
        ours: epigemm's.
        eager: PyTorch's.
        offset: how many elements x lies behind an aligned address.
        operands: the number of matrices like the result.
        halves: whether the weight and the bias have two halves, of N rows each.
        autocast: to bf16.
        recorded: whether the weight requires a gradient.
    """

    def make(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
        assert shape.k is not None
        rows = torch.randn(shape.m * shape.k + offset, device=device, dtype=dtype)
        x = rows[offset:].view(shape.m, shape.k)
        layer = nn.Linear(shape.k, (2 if halves else 1) * shape.n, device=device, dtype=dtype)
        layer.requires_grad_(recorded)
        matrices = torch.randn(operands, shape.m, shape.n, device=device, dtype=dtype).unbind()

        def run(function: Callable[..., Any]) -> Any:
            with (
                torch.set_grad_enabled(recorded),
                torch.autocast(device.type, torch.bfloat16, enabled=autocast),
            ):
                return function(x, layer.weight, layer.bias, *matrices)

        return {EAGER: lambda: run(eager), FUNCTION: lambda: run(ours)}

    return make


def _eager_glu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    first, second = F.linear(x, weight, bias).chunk(2, -1)
    return F.silu(first) * second


def _residual(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x = _rows(Shape(shape.m, shape.n), device, dtype)
    out = torch.empty_like(x)
    return {
        TORCH: lambda: torch.sigmoid(x),
        EAGER: lambda: _sigmoid_scale_residual(x),
        FUNCTION: lambda: epigemm.sigmoid_scale_residual(x, _SCALE),
        OUT: lambda: epigemm.sigmoid_scale_residual(x, _SCALE, out=out),
    }


def _batch_norm(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x = _rows(Shape(shape.m, shape.n), device, dtype)
    out = torch.empty_like(x)
    scale, *vectors = torch.rand(5, shape.n, device=device, dtype=dtype).add_(0.5)
    return {
        TORCH: lambda: F.batch_norm(x, *vectors),
        EAGER: lambda: F.batch_norm(x * scale, *vectors),
        FUNCTION: lambda: epigemm.scale_batch_norm(x, scale, *vectors),
        OUT: lambda: epigemm.scale_batch_norm(x, scale, *vectors, out=out),
    }


def _sigmoid(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x = _rows(Shape(shape.m, shape.n), device, dtype)
    out, module = torch.empty_like(x), epigemm.nn.Sigmoid()
    return {
        TORCH: lambda: torch.sigmoid(x),
        FUNCTION: lambda: epigemm.sigmoid(x),
        OUT: lambda: epigemm.sigmoid(x, out=out),
        MODULE: lambda: module(x),
    }


def _train_step(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x, layer = _rows(shape, device, dtype), _layer(shape, device, dtype)
    gradient = torch.randn(shape.m, shape.n, device=device, dtype=dtype)
    parameters = tuple(layer.parameters())

    def step(module: nn.Module) -> Tensor:
        result: Tensor = module(x)
        torch.autograd.backward(result, gradient)
        for parameter in parameters:
            parameter.grad = None
        return result

    module, chain = epigemm.nn.LinearReLU.from_linear(layer), nn.Sequential(layer, nn.ReLU())
    return {EAGER: lambda: step(chain), MODULE: lambda: step(module)}


def _compiled(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    compile_in_this_process()
    x, layer = _rows(shape, device, dtype), _layer(shape, device, dtype)
    chain = torch.compile(nn.Sequential(layer, nn.ReLU()))
    module = torch.compile(epigemm.nn.LinearReLU.from_linear(layer))
    return {INDUCTOR: lambda: chain(x), EPIGEMM: lambda: module(x)}


_linear_relu = _linear(
    torch.relu,
    lambda layer: nn.Sequential(layer, nn.ReLU()),
    epigemm.linear_relu,
    epigemm.nn.LinearReLU.from_linear,
)
_linear_sigmoid_scale_residual = _linear(
    _sigmoid_scale_residual,
    _SigmoidScaleResidual,
    epigemm.linear_sigmoid_scale_residual,
    epigemm.nn.LinearSigmoidScaleResidual.from_linear,
    (_SCALE,),
)
_custom_gelu = _linear(F.gelu, lambda layer: nn.Sequential(layer, nn.GELU()), _gelu)


def _eager_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(F.linear(x, weight, bias))


def _eager_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + residual


def _eager_gate(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) * gate


_relu = _call(epigemm.linear_relu, _eager_relu)
_glu = _call(epigemm.linear_glu, _eager_glu, halves=True)
_recorded = _call(epigemm.linear_gelu, lambda *given: F.gelu(F.linear(*given)), recorded=True)
CASES: dict[str, tuple[_Maker, torch.dtype, Shape]] = {
    "linear_relu/bf16": (_linear_relu, torch.bfloat16, _LAYER),
    "linear_relu_small/bf16": (_linear_relu, torch.bfloat16, _SMALL),
    "linear_relu/fp32": (_linear_relu, torch.float32, _ON_SLICES),
    "linear_relu_small/fp32": (_linear_relu, torch.float32, _SMALL),
    "custom_gelu/bf16": (_custom_gelu, torch.bfloat16, _LAYER),
    "custom_gelu_small/bf16": (_custom_gelu, torch.bfloat16, _SMALL),
    "custom_gelu/fp32": (_custom_gelu, torch.float32, _ON_SLICES),
    "sigmoid_scale_residual/bf16": (_residual, torch.bfloat16, _SMALL),
    "linear_sigmoid_scale_residual/bf16": (_linear_sigmoid_scale_residual, torch.bfloat16, _LAYER),
    "batch_norm/bf16": (_batch_norm, torch.bfloat16, _SMALL),
    "sigmoid/bf16": (_sigmoid, torch.bfloat16, _SMALL),
    "train_step/bf16": (_train_step, torch.bfloat16, _LAYER),
    "train_step/fp32": (_train_step, torch.float32, _LAYER),
    "call/odd_n/bf16": (_relu, torch.bfloat16, Shape(64, 1023, 1024)),
    "call/odd_k/bf16": (_relu, torch.bfloat16, Shape(64, 1024, 1023)),
    "call/odd/fp32": (_relu, torch.float32, Shape(123, 207, 311)),
    "call/offset/bf16": (_call(epigemm.linear_relu, _eager_relu, offset=1), torch.bfloat16, _LAYER),
    "call/plain/fp32": (_relu, torch.float32, _ON_SLICES),
    "call/residual/bf16": (
        _call(epigemm.linear_residual, _eager_residual, operands=1),
        torch.bfloat16,
        _LAYER,
    ),
    "call/own_gate/bf16": (_call(_gate, _eager_gate, operands=1), torch.bfloat16, _LAYER),
    "call/two_results/bf16": (_call(lambda *given: _two(*given)[0], _eager_relu), torch.bfloat16, _LAYER),
    "call/glu/bf16": (_glu, torch.bfloat16, _LAYER),
    "call/glu/fp32": (_glu, torch.float32, _ON_SLICES),
    "call/autocast/bf16": (_call(epigemm.linear_relu, _eager_relu, autocast=True), torch.float32, _LAYER),
    "call/recorded/bf16": (_recorded, torch.bfloat16, _LAYER),
    "call/recorded/fp32": (_recorded, torch.float32, _LAYER),
    _COMPILED: (_compiled, torch.bfloat16, _LAYER),
}


def select(patterns: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The names of the cases to measure, and of those left out, with the reasons.

    Args:
        patterns: names, parts of names or shell patterns; none: all that make sense on the device.
        device: where they are to run.

    Raises:
        ValueError: a pattern matches no case.
    """
    names = matching(list(CASES), patterns, "with --host")
    if patterns or device.type == "cuda":
        return names, {}
    return [name for name in names if name != _COMPILED], {
        _COMPILED: "on a CPU only if asked for: --cases compiled"
    }


def make(name: str, shape: Shape | None, device: torch.device) -> HostCase:
    """A case with its tensors.

    Args:
        name: of the case.
        shape: M x N x K; None: one so small that a GPU is done before the host, on a CPU a tiny one.
        device: where the tensors are.
    """
    maker, dtype, own_shape = CASES[name]
    if shape is None:
        shape = _CPU_SHAPE if device.type == "cpu" else own_shape
    return HostCase(name, shape, maker(shape, device, dtype), gradients=maker in (_train_step, _recorded))
