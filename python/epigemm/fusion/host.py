"""Whether the GPU waits for the host in a graph. If it does, fused calls pay only as far as they spare the host.

All times are estimates: of the device from the planner and from the bytes that other operators move, of the host from
the number of kernels (measured on an H200's host, docs/fuse.md). They are wanted only to tell whose time counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor, fx

from epigemm import decisions
from epigemm.fusion.capture import Chain
from epigemm.fusion.profit import Judged
from epigemm.fusion.values import hint, storage_of, tensor_of

WAITS = "the GPU waits for the host at these sizes, and fused calls spare the host too little"


class Launches(Enum):
    """Who launches the kernels of a graph."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    CUDA_GRAPH = "a CUDA graph"


# Microseconds of the host for each kernel: an eager model's modules, views and launches; and Inductor's, which makes
# one kernel of about three operators that are no products.
_KERNEL_US = {Launches.EAGER: 14.0, Launches.INDUCTOR: 20.0}
_OPERATORS_A_KERNEL = {Launches.EAGER: 1, Launches.INDUCTOR: 3}
# What a fused call takes the host more than PyTorch's product, by its way: there are up to four launches on slices.
_CALL_US = {decisions.TENSORS: 4.0, decisions.SLICES: 30.0, decisions.FALLBACK: 8.0}
# What a call of a fused model takes the host more than the model's own: Dynamo's guards and ours.
_GRAPH_US = 60.0
# So many times more rows, or fewer, are decided about anew.
_FAR = 4
# Of a kernel that is no product: what it takes at least, and the bytes that it moves in a microsecond.
_LEAST_US, _BYTES_PER_US = 3.0, 3e6


def why_not(graph: fx.Graph, chains: Mapping[Chain, Judged], launches: Launches) -> str:
    """Why none of the chains of a graph is to be fused, each of which pays the device; empty where they are.

    Args:
        graph: Dynamo's.
        chains: all of them, those too that are not worth a fused call.
        launches: who launches its kernels.
    """
    taken = [(chain, judged) for chain, judged in chains.items() if not judged.why_not]
    on_gpu = any(judged.fallback_us for judged in chains.values())
    if not taken or not on_gpu or launches is Launches.CUDA_GRAPH:
        return ""
    kernels = _kernels(graph)
    in_chains = {node for chain in chains for node in chain.nodes}
    others = [node for node in kernels if node not in in_chains]
    device_us = sum(judged.fallback_us for judged in chains.values()) + sum(map(_device_us, others))
    operators = sum(_count(chain, kernels) - 1 for chain in chains) + len(others)
    host_us = _KERNEL_US[launches] * (len(chains) + operators / _OPERATORS_A_KERNEL[launches])
    if host_us < device_us:
        return ""
    if launches is Launches.INDUCTOR:
        return WAITS
    spared = sum(
        _KERNEL_US[launches] * (_count(chain, kernels) - 1) - _CALL_US[judged.way] for chain, judged in taken
    )
    return "" if spared > _GRAPH_US else WAITS


def guard_sizes(graph: fx.Graph) -> None:
    """Have Dynamo ask again, with another graph, where the sizes of a call are far from those of this one.

    A graph serves all sizes that it has symbols for, but what is fused in it was decided for the sizes at hand.
    """
    for node in graph.nodes:
        size = node.meta.get("example_value") if node.op == "placeholder" else None
        if isinstance(size, torch.SymInt):
            now = hint(size)
            bool(size <= _FAR * now) and bool(_FAR * size > now)  # each comparison becomes a guard


def _kernels(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that launch a kernel: their results are new tensors, no views."""
    found, seen = set(), set()
    for node in graph.nodes:
        value = tensor_of(node)
        if value is None:
            continue
        if node.op.startswith("call") and storage_of(value) not in seen:
            found.add(node)
        seen.add(storage_of(value))
    return found


def _count(chain: Chain, kernels: set[fx.Node]) -> int:
    """Kernels of a chain without fusion."""
    return max(1, sum(node in kernels for node in chain.nodes))


def _device_us(node: fx.Node) -> float:
    tensors = [tensor_of(each) for each in (node, *node.all_input_nodes)]
    return _LEAST_US + sum(_bytes(tensor) for tensor in tensors if tensor is not None) / _BYTES_PER_US


def _bytes(tensor: Tensor) -> int:
    return math.prod(map(hint, tensor.shape)) * tensor.element_size()
