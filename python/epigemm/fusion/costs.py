"""Estimates of the device's time for the elementwise kernels of a chain, by the bytes that they move."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.epilogues.kinds import MATRIX
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of
from epigemm.fusion.operands import ChainOperand
from epigemm.fusion.values import hint, tensor_of, value_at

# The least time of a kernel, and the bytes that it moves in a microsecond on an H200, also as a share of a GPU's
# nominal bandwidth.
_LEAST_US, _BYTES_PER_US, _OF_NOMINAL = 3.0, 3e6, 0.61


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
    """The time of an elementwise kernel: that of moving its bytes."""
    tensors = [tensor for each in (node, *node.all_input_nodes) if (tensor := tensor_of(each)) is not None]
    return _moved_us(tensors, _index_of(tensors))


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
