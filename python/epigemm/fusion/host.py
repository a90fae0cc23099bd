"""Whether the GPU waits for the host in a graph. If it does, fused calls pay only as far as they spare the host.

A call takes as long as the slower of the two. All times are estimates: of the device from the planner, and of other
operators from what they compute and the bytes that they move; of the host from the number of kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.arguments import precision
from epigemm.fusion import flops, matmuls
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.values import hint, tensor_of
from epigemm.planning import plans

WAITS = "the GPU waits for the host at these sizes, and fused calls spare the host too little"


class Launches(Enum):
    """Who launches the kernels of a graph."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    CUDA_GRAPH = "a CUDA graph"


# Microseconds of the host for each kernel: an eager model's modules, views and launches; and Inductor's, which makes
# one kernel of about two operators that are no products.
_KERNEL_US = {Launches.EAGER: 14.0, Launches.INDUCTOR: 20.0}
_OPERATORS_A_KERNEL = {Launches.EAGER: 1, Launches.INDUCTOR: 2}
# What a fused call takes the host more than PyTorch's product, by its way: there are up to four launches on slices.
_CALL_US = {
    Launches.EAGER: {Way.TENSORS: 0.0, Way.SLICES: 30.0, Way.FALLBACK: 14.0},
    Launches.INDUCTOR: {Way.TENSORS: 14.0, Way.SLICES: 40.0, Way.FALLBACK: 14.0},
}
# What a call of a fused model takes the host more than the model's own: guards, less the calls of modules.
_GRAPH_US = {Launches.EAGER: 30.0, Launches.INDUCTOR: 0.0}
_WORTH = 0.97  # of the time: less is within the error of these estimates
# So many times more rows, or fewer, are decided about anew.
_FAR = 4
# Of a kernel that is no product: what it takes at least, and the bytes that it moves in a microsecond: of an H200, and
# of the nominal bandwidth of any.
_LEAST_US, _BYTES_PER_US, _OF_NOMINAL = 3.0, 3e6, 0.61
# The product whose speed is that of the device: large, and so near what PyTorch's GEMM reaches.
_LARGE = 8192


def why_not(graph: fx.Graph, chains: Mapping[Chain, Judged], launches: Launches) -> str:
    """Why none of the chains of a graph is to be fused, though some pay the device; empty where these are.

    `chains` are all of them, those too that are not worth a fused call.
    """
    taken = {chain: judged for chain, judged in chains.items() if not judged.why_not}
    on_gpu = any(judged.fallback_us for judged in chains.values())
    if not taken or not on_gpu or launches is Launches.CUDA_GRAPH:
        return ""
    kernels = _kernels(graph)
    in_chains = {node for chain in chains for node in chain.nodes}
    others = [node for node in kernels if node not in in_chains]
    behind = {chain: [node for node in chain.nodes[1:] if node in kernels] for chain in chains}

    plain_us = {chain: _plain_us(judged, behind[chain]) for chain, judged in chains.items()}
    device_us = sum(plain_us.values()) + sum(map(_device_us, others))
    gained_us = sum(plain_us[chain] - judged.fused_us for chain, judged in taken.items())
    operators = len(others) + sum(map(len, behind.values()))
    host_us = _KERNEL_US[launches] * (len(chains) + operators / _OPERATORS_A_KERNEL[launches])
    more_us = _GRAPH_US[launches] + sum(_CALL_US[launches][judged.way] for judged in taken.values())
    if launches is Launches.EAGER:  # Inductor has merged them with what follows
        more_us -= _KERNEL_US[launches] * sum(len(behind[chain]) for chain in taken)
    fused, plain = max(device_us - gained_us, host_us + more_us), max(device_us, host_us)
    return "" if host_us + more_us < device_us - gained_us or fused < _WORTH * plain else WAITS


def guard_sizes(graph: fx.Graph) -> None:
    """Have Dynamo ask again, with another graph, where the sizes of a call are far from those of this one.

    A graph serves all sizes that it has symbols for, but what is fused in it was decided for the sizes at hand.
    """
    given = (node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder")
    sizes = [size for size in given if isinstance(size, torch.SymInt) and size.node.has_hint()]
    if sizes:
        together, now = math.prod(sizes), math.prod(map(hint, sizes))
        bool(together <= _FAR * now) and bool(_FAR * together > now)  # each comparison becomes a guard


def _kernels(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that launch a kernel: they run more than views."""
    calls = (node for node in graph.nodes if node.op.startswith("call") and tensor_of(node) is not None)
    return {node for node in calls if not effects_of(node).is_view}


def _plain_us(judged: Judged, behind: list[fx.Node]) -> float:
    """Of a chain without fusion, operator by operator: the fallback has one of them, or a ReLU in the product."""
    more = sorted(map(_device_us, behind))
    return judged.fallback_us + sum(more if judged.way == Way.FALLBACK else more[:-1])


def _device_us(node: fx.Node) -> float:
    """Of a kernel that is no chain: the longer one of the time that it computes and the time that it moves bytes."""
    read = [] if "embedding" in str(node.target) else node.all_input_nodes  # which reads few of its rows
    tensors = [tensor for each in (node, *read) if (tensor := tensor_of(each)) is not None]
    index = next((tensor.get_device() for tensor in tensors if tensor.is_cuda), -1)
    computing_us = sum(
        count / _flops_per_us(dtype, _uses_tf32(name, dtype), index, plans.gpu_numbers(index))
        for name, dtype, count in effects_of(node).flops
    )
    return max(computing_us, _LEAST_US + sum(map(_bytes, tensors)) / _bytes_per_us(index))


def _bytes(tensor: Tensor) -> int:
    return math.prod(map(hint, tensor.shape)) * tensor.element_size()


@functools.cache
def _bytes_per_us(device: int) -> float:
    about: Any = torch.cuda.get_device_properties(device) if device >= 0 else None
    kilohertz, bits = (getattr(about, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    nominal = 2e3 * kilohertz * bits / 8 / 1e6  # twice a cycle
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
    """What PyTorch's GEMM computes in a microsecond, as the planner has it."""
    known = str(dtype).removeprefix("torch.") if dtype in matmuls.DTYPES else "float32"
    numbers = {"tf32_allowed": tf32, "has_bias": False, "gpu": gpu, "device": device}
    asked = plans.ask("bias", _LARGE, _LARGE, _LARGE, known, precision.IEEE, **numbers)  # type: ignore[arg-type]
    return 2.0 * _LARGE**3 / (plans.fallback_us(asked) or math.inf) or math.inf
