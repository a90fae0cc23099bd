"""Estimates of the device's time for kernels outside of chains, and for the single kernels of a chain.

For an operator with a formula for its FLOPs it is the larger of the times for computing and for moving bytes. For
others it is the time for the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.arguments import precision
from epigemm.epilogues.kinds import MATRIX
from epigemm.fusion import flops, matmuls
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of
from epigemm.fusion.operands import ChainOperand
from epigemm.fusion.values import hint, tensor_of, value_at
from epigemm.planning import plans

# The least time of a kernel, and the bytes that it moves in a microsecond on an H200, also as a share of a GPU's
# nominal bandwidth.
_LEAST_US, _BYTES_PER_US, _OF_NOMINAL = 3.0, 3e6, 0.61
# A product whose predicted speed is used for the device: large, so near the best speed of PyTorch's GEMM.
_LARGE = 8192


def kernels_behind(chain: Chain) -> list[fx.Node]:
    """The nodes of a chain behind its product that launch kernels in eager mode."""
    return [node for node in chain.nodes[1:] if not effects_of(node).is_view]


def one_kernel_us(chain: Chain) -> float:
    """The time of one elementwise kernel behind a chain's product: it reads that and matrices, and writes one."""
    matrices = [
        value_at(each.sources[0])
        for each in chain.operands
        if isinstance(each, ChainOperand) and each.kind == MATRIX
    ]
    product = chain.product.value
    return _moved_us((product, product, *matrices), _index_of((product,)))


def device_us(node: fx.Node) -> float:
    """The time of a kernel outside of chains: the larger of the times for computing and for moving bytes."""
    read = [] if "embedding" in str(node.target) else node.all_input_nodes  # which reads few of its rows
    tensors = [tensor for each in (node, *read) if (tensor := tensor_of(each)) is not None]
    index = _index_of(tensors)
    computing_us = sum(
        count / _flops_per_us(dtype, _uses_tf32(name, dtype), index, plans.gpu_numbers(index))
        for name, dtype, count in effects_of(node).flops
    )
    return max(computing_us, _moved_us(tensors, index))


def _index_of(tensors: Iterable[Tensor]) -> int:
    return next((tensor.get_device() for tensor in tensors if tensor.is_cuda), -1)


def moved_us(tensors: Sequence[Tensor]) -> float:
    """The time of a kernel that moves some tensors and computes little."""
    return _moved_us(tensors, _index_of(tensors))


def _moved_us(tensors: Iterable[Tensor], device: int) -> float:
    return _LEAST_US + sum(map(_bytes, tensors)) / _bytes_per_us(device)


def _bytes(tensor: Tensor) -> int:
    return math.prod(map(hint, tensor.shape)) * tensor.element_size()


@functools.cache
def _bytes_per_us(device: int) -> float:
    about: Any = torch.cuda.get_device_properties(device) if device >= 0 else None
    kilohertz, bits = (getattr(about, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    nominal = 2e3 * kilohertz * bits / 8 / 1e6  # two transfers a cycle
    return _OF_NOMINAL * nominal or _BYTES_PER_US


def _uses_tf32(name: str, dtype: torch.dtype) -> bool:
    """Whether an operator of PyTorch's multiplies in TF32."""
    if dtype != torch.float32:
        return False
    if any(part in name for part in flops.CONVOLUTIONS):
        return bool(torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32")
    return precision.order(None, "cuda").tf32_allowed


@functools.cache
def _flops_per_us(dtype: torch.dtype, tf32: bool, device: int, gpu: tuple[int, ...]) -> float:
    """The FLOPs of PyTorch's GEMM in a microsecond, by the planner's model."""
    known = str(dtype).removeprefix("torch.") if dtype in matmuls.DTYPES else "float32"
    numbers = {"tf32_allowed": tf32, "has_bias": False, "gpu": gpu, "device": device}
    asked = plans.ask("bias", _LARGE, _LARGE, _LARGE, known, precision.IEEE, **numbers)  # type: ignore[arg-type]
    return 2.0 * _LARGE**3 / (plans.fallback_us(asked) or math.inf) or math.inf
