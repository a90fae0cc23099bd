"""Whether fusing a call pays: a fused call keeps the host longer, and the device shorter.

The device hides the host's time if it has as much to do by then, so a call is fused where PyTorch's own operators would
keep the device for at least as long as the fused call keeps the host. The host's times were measured on an H200 (512 x
1024 x 1024, one layer, the checks of a fused model included): PyTorch's own operators take 20 to 60 us for inference,
60 to 100 us compiled and 120 to 300 us with a backward pass. A fused call takes 30 to 45 us for inference, 70 to 100 us
where vectors are folded first, some 20 and 60 us more than PyTorch's operators where it is compiled, and 370 to 1900 us
with a backward pass. `_HOST_US` is that, or more where whole models were slower. In a CUDA graph the host has no part:
calls that are captured are all fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from epigemm import plans
from epigemm import precision as _precision
from epigemm.epilogues import BIAS, BIAS_RELU, RELU_DIV, SCALE_BATCH_NORM, SIGMOID_SCALE_RESIDUAL
from epigemm.fusion import chains

REAL = (Tensor, torch.nn.Parameter)
ON_CPU = "on a CPU PyTorch's own operators are as fast"
IN_FP64 = "in fp64 PyTorch's own operators are as fast"
TOO_SMALL = "the product is so small that the host's time decides"
NO_KERNEL = (
    "no kernel on fp16 pieces is faster there, and the compiler fuses what follows a product of PyTorch's"
)
REASONS = (ON_CPU, IN_FP64, TOO_SMALL)
NEVER = float("inf")

_HALF, _TF32, _IEEE = "16 bits", "tf32", "ieee"
_INFERENCE, _TRAINING, _COMPILED = "inference", "training", "compiled"
_FOLDED = (chains.SCALE, chains.BATCH_NORM)
_EPILOGUES = {
    chains.LINEAR: BIAS.name,
    chains.RELU: BIAS_RELU.name,
    chains.RELU_DIV: RELU_DIV.name,
    chains.RESIDUAL: SIGMOID_SCALE_RESIDUAL.name,
    **dict.fromkeys(_FOLDED, SCALE_BATCH_NORM.name),
}

_PRODUCTS_PER_US = {_HALF: 350e6, _TF32: 200e6, _IEEE: 25e6}
_HOST_US: dict[tuple[str, str, bool], float] = {
    # What a call multiplies in, how it is made, whether vectors are folded first.
    (_HALF, _INFERENCE, False): 30,
    (_HALF, _INFERENCE, True): 75,
    (_HALF, _COMPILED, False): 40,
    (_HALF, _COMPILED, True): 80,
    (_HALF, _TRAINING, False): NEVER,  # 2% at best: the products are the same
    (_HALF, _TRAINING, True): NEVER,
    (_TF32, _INFERENCE, False): 45,
    (_TF32, _INFERENCE, True): 80,
    (_TF32, _COMPILED, False): 60,
    (_TF32, _COMPILED, True): 100,
    (_TF32, _TRAINING, False): 2000,
    (_TF32, _TRAINING, True): 2000,
    (_IEEE, _INFERENCE, False): 55,
    (_IEEE, _INFERENCE, True): 100,
    (_IEEE, _COMPILED, False): 110,
    (_IEEE, _COMPILED, True): 150,
    (_IEEE, _TRAINING, False): 450,
    (_IEEE, _TRAINING, True): 1900,
}
# cuBLAS's plain fp32 kernels also take this long for each step of K, however few rows and columns there are.
_PRODUCTS_PER_STEP, _FEWEST_ROWS = 0.02 * _PRODUCTS_PER_US[_IEEE], 16
_TRAINING_PRODUCTS = 3


def _least(arithmetic: str, mode: str, host_us: float) -> float:
    return host_us * _PRODUCTS_PER_US[arithmetic] / (_TRAINING_PRODUCTS if mode == _TRAINING else 1)


LIMITS = {key: _least(key[0], key[1], host_us) for key, host_us in _HOST_US.items()}
"""The least M * N * K, by arithmetic ("16 bits", "tf32", "ieee"), mode ("inference", "training", "compiled") and
whether vectors are folded."""

_host_is_hidden = False


@contextmanager
def in_cuda_graphs() -> Iterator[None]:
    """What is compiled in the block will be captured."""
    global _host_is_hidden
    before, _host_is_hidden = _host_is_hidden, True
    try:
        yield
    finally:
        _host_is_hidden = before


def why_not(function: str, x: Tensor, weight: Tensor, *, keeps_pack: bool = False) -> str:
    """Why a call of one of epigemm's functions is not worth fusing; empty where it is.

    `keeps_pack`: the weight keeps its fp16 pieces between calls.
    """
    if not LIMITS:
        return ""
    if not x.is_cuda:
        return ON_CPU if x.is_cpu else ""
    if x.dtype == torch.float64:
        return IN_FP64
    mode = _INFERENCE
    if type(x) not in REAL or torch.compiler.is_compiling():  # fake tensors: a graph is being made
        if _host_is_hidden:
            return ""
        mode = _COMPILED
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if mode == _INFERENCE:
            mode = _TRAINING
        elif x.element_size() == 2:
            return TOO_SMALL
    arithmetic = _arithmetic(x)
    depth, elements = _hint(x.shape[-1]), _hint(x.numel())
    products = elements * (_hint(weight.numel()) // max(1, depth))
    if arithmetic == _IEEE and elements >= _FEWEST_ROWS * depth:
        products += int(_PRODUCTS_PER_STEP * depth)
    if products >= LIMITS[arithmetic, mode, function in _FOLDED]:
        # Dynamo, which traces a fused model with types of real tensors, could not ask.
        asks = mode == _COMPILED and arithmetic == _IEEE and type(x) not in REAL
        alone = asks and not _has_kernel(function, x, weight, keeps_pack)
        return NO_KERNEL if alone else ""
    return "" if mode != _COMPILED and torch.cuda.is_current_stream_capturing() else TOO_SMALL


def _has_kernel(function: str, x: Tensor, weight: Tensor, keeps_pack: bool) -> bool:
    """Whether dispatch expects kernels on fp16 pieces to be the fastest; True where there is no GPU to ask about."""
    if not torch.cuda.is_available():
        return True
    n, k = _hint(weight.shape[0]), _hint(weight.shape[1])
    if k != _hint(x.shape[-1]):
        n, k = k, n
    m = _hint(x.numel()) // max(1, k)
    problem = (_EPILOGUES[function], m, n, k, keeps_pack, _precision.SPLIT, False, x.get_device())
    return not plans.why_not_on_pieces(*problem)


def _arithmetic(x: Tensor) -> str:
    if x.dtype != torch.float32 or torch.is_autocast_enabled("cuda"):
        return _HALF
    return _fp32_arithmetic()


def _fp32_arithmetic() -> str:
    return _IEEE if _precision.torch_setting("cuda") in ("none", _precision.IEEE) else _TF32


# Dynamo, where it traces a fused model, has a guard of its own for the setting. This is what
# `torch.compiler.assume_constant_result` does, which would import Dynamo for those, too, who compile nothing.
_fp32_arithmetic._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _hint(size: Any) -> int:
    """A size, or what it was in the call that is being compiled; nothing is guarded for a question of speed."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return hint if isinstance(hint, int) else 1 << 62
