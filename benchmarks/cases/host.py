"""What ``python -m benchmarks --host`` calls: the cases, and the ways to call each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from benchmarks.cases import Shape, compile_in_this_process, matching
from epigemm import PerColumn
from epigemm.timing import Run

# The names are part of the record's format.
VARIANTS = {
    "f_linear": "F.linear with a bias, without the epilogue",
    "torch": "one operator of PyTorch: torch.sigmoid, F.batch_norm",
    "eager": "every operator of the formula in eager PyTorch; train_step: as a module",
    "function": "epigemm's function; fp32: at torch's default precision, on a packed weight",
    "function_plain": "the same on a plain fp32 weight",
    "out": "the function into `out=`",
    "module": "epigemm's module",
    "module_eager": "a module that calls the chain",
    "inductor": "torch.compile of that module",
    "epigemm": "torch.compile of epigemm's module",
}

Runs = dict[str, Run]
_Maker = Callable[[Shape, torch.device, torch.dtype], Runs]
_SCALE = 0.5
# A layer for which a kernel of ours is planned in bf16; one that runs on fp16 slices in fp32, and is over before the
# host is; a smaller one for which PyTorch's GEMM is planned.
_LAYER, _ON_SLICES, _SMALL = Shape(64, 1024, 1024), Shape(16, 1024, 1024), Shape(16, 256, 256)
_CPU_SHAPE = Shape(8, 64, 64)
_COMPILED = "compiled/bf16"


@dataclass(frozen=True)
class HostCase:
    """One formula in one type.

    Attributes:
        name: `CASES` has them all.
        shape: M x N x K; elementwise: M x N of it.
        runs: by variant; all compute the same, but for "f_linear" and "torch", which may leave operators out.
        gradients: whether they are recorded.
    """

    name: str
    shape: Shape
    runs: Runs
    gradients: bool = False


class _SigmoidScaleResidual(nn.Module):
    """The chain of operators as a module."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return _sigmoid_scale_residual(self.linear(x))


def _sigmoid_scale_residual(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * _SCALE + z


def _rows(shape: Shape, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.m, shape.k or shape.n, device=device, dtype=dtype)


def _layer(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(shape.k or shape.n, shape.n, device=device, dtype=dtype)


def _linear(
    ours: Callable[..., Tensor],
    after: Callable[[Tensor], Tensor],
    modules: Callable[[nn.Linear], tuple[nn.Module, nn.Module]] | None = None,
    *scalars: float,
    plain: bool = False,
) -> _Maker:
    """A linear layer by `ours`, and as `after` of ``F.linear``; `modules`: ours and the chain of a layer."""

    def make(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
        x, layer = _rows(shape, device, dtype), _layer(shape, device, dtype)
        weight, bias = layer.weight.detach(), layer.bias.detach()
        fp32 = dtype == torch.float32
        given = epigemm.pack(weight) if fp32 else weight
        out = F.linear(x, weight, bias)
        # Of a clone nothing is kept.
        copy = weight.clone()
        runs: Runs = {
            "f_linear": lambda: F.linear(x, weight, bias),
            "eager": lambda: after(F.linear(x, weight, bias)),
            "function": lambda: ours(x, given, bias, *scalars),
            "out": lambda: ours(x, given, bias, *scalars, out=out),
        }
        if modules:
            module, chain = modules(layer)
            runs |= {"module": lambda: module(x), "module_eager": lambda: chain(x)}
        return runs | ({"function_plain": lambda: ours(x, copy, bias)} if fp32 and plain else {})

    return make


@epigemm.epilogue
def _gelu(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc + bias)


def _relu_modules(layer: nn.Linear) -> tuple[nn.Module, nn.Module]:
    return epigemm.nn.LinearReLU.from_linear(layer), nn.Sequential(layer, nn.ReLU())


def _sigmoid_modules(layer: nn.Linear) -> tuple[nn.Module, nn.Module]:
    return epigemm.nn.LinearSigmoidScaleResidual.from_linear(layer, _SCALE), _SigmoidScaleResidual(layer)


_linear_relu = _linear(epigemm.linear_relu, torch.relu, _relu_modules, plain=True)
_linear_sigmoid_scale_residual = _linear(
    epigemm.linear_sigmoid_scale_residual, _sigmoid_scale_residual, _sigmoid_modules, _SCALE
)
_custom_gelu = _linear(_gelu, F.gelu)


def _residual(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x = _rows(Shape(shape.m, shape.n), device, dtype)
    out = torch.empty_like(x)
    return {
        "torch": lambda: torch.sigmoid(x),
        "eager": lambda: torch.sigmoid(x) * _SCALE + x,
        "function": lambda: epigemm.sigmoid_scale_residual(x, _SCALE),
        "out": lambda: epigemm.sigmoid_scale_residual(x, _SCALE, out=out),
    }


def _batch_norm(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x = _rows(Shape(shape.m, shape.n), device, dtype)
    out = torch.empty_like(x)
    scale, mean, var, weight, bias = torch.rand(5, shape.n, device=device, dtype=dtype).add_(0.5)
    return {
        "torch": lambda: F.batch_norm(x, mean, var, weight, bias),
        "eager": lambda: F.batch_norm(x * scale, mean, var, weight, bias),
        "function": lambda: epigemm.scale_batch_norm(x, scale, mean, var, weight, bias),
        "out": lambda: epigemm.scale_batch_norm(x, scale, mean, var, weight, bias, out=out),
    }


def _sigmoid(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    x = _rows(Shape(shape.m, shape.n), device, dtype)
    out, module = torch.empty_like(x), epigemm.nn.Sigmoid()
    return {
        "torch": lambda: torch.sigmoid(x),
        "function": lambda: epigemm.sigmoid(x),
        "out": lambda: epigemm.sigmoid(x, out=out),
        "module": lambda: module(x),
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

    module, chain = _relu_modules(layer)
    return {"eager": lambda: step(chain), "module": lambda: step(module)}


def _compiled(shape: Shape, device: torch.device, dtype: torch.dtype) -> Runs:
    compile_in_this_process()
    x, layer = _rows(shape, device, dtype), _layer(shape, device, dtype)
    chain = torch.compile(nn.Sequential(layer, nn.ReLU()))
    module = torch.compile(epigemm.nn.LinearReLU.from_linear(layer))
    return {"inductor": lambda: chain(x), "epigemm": lambda: module(x)}


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
    return HostCase(name, shape, maker(shape, device, dtype), gradients=maker is _train_step)
