"""Whether the GPU waits for the host in a graph. If it does, fused calls gain only the host's time that they save.

A call takes as long as the slower of the two. All times are estimates. The device's time comes from the planner, and
for other operators from their FLOPs and bytes. The host's time comes from the number of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import torch
from torch import fx

from epigemm.fusion import costs, profit
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of
from epigemm.fusion.pairs import Before
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.values import hint, tensor_of

WAITS = "the GPU waits for the host at these sizes, and fused calls would save too little of its time"

UNSURE = (
    "it is not sure that fused calls are faster: the first calls run them and the original forward in turn"
)


class Launches(Enum):
    """Who launches the kernels of a graph."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    CUDA_GRAPH = "a CUDA graph"
    INDUCTOR_GRAPH = "a CUDA graph of Inductor's kernels"

    @property
    def is_one_by_one(self) -> bool:
        """Whether each operator has a kernel of its own. Inductor makes one kernel of several operators."""
        return self in (Launches.EAGER, Launches.CUDA_GRAPH)


# Microseconds of the host for each kernel: an eager model's modules, views and launches; and Inductor's, which makes
# one kernel of about two operators that are no products.
_KERNEL_US = {Launches.EAGER: 14.0, Launches.INDUCTOR: 20.0}
_OPERATORS_A_KERNEL = {Launches.EAGER: 1, Launches.INDUCTOR: 2}
# The host's additional time for a fused call, compared with PyTorch's product, by its `Way`: on slices there are up to
# four launches. The figures for Inductor were not measured: 14 is one more launch, as for an eager kernel above, and 40
# three.
_CALL_US = {
    Launches.EAGER: {Way.TENSORS: 0.0, Way.SLICES: 30.0, Way.FALLBACK: 14.0, Way.TWO_KERNELS: 14.0},
    Launches.INDUCTOR: {Way.TENSORS: 14.0, Way.SLICES: 40.0, Way.FALLBACK: 14.0, Way.TWO_KERNELS: 14.0},
}
# The additional time of a recorded call of two kernels: its node is in Python, and those of the operators that it
# replaces in C++.
_RECORDED_US = 60.0
# The host's additional time for a call of a fused model: guards, minus the calls of modules. Measured on a CPU (Python
# 3.11, torch 2.13) with nothing fused: 39, 36, 26 us for 1, 4, 12 linear layers with a GELU. It was 9 us for a model
# without operators. Inductor's graphs have the same guards without fused calls.
_GRAPH_US = {Launches.EAGER: 30.0, Launches.INDUCTOR: 0.0}
_WORTH = 0.97  # of the time without fusion: a smaller gain is within the error of these estimates
# The factor by which hosts differ; the share of the time below which a graph is sure to gain; and the share above which
# it is not tried. The second is far from 1, because estimates are worse at sizes to which nothing was fitted.
_HOSTS_ERROR, _SURE, _LOST = 2.0, 0.7, 1.15
# The decision is made again for so many times more rows, or fewer.
_FAR = 4


class Verdict(NamedTuple):
    """Whether the chains of a graph are to be fused.

    Attributes:
        why_not: why none is fused although some would save device time; empty if they are fused.
        is_unsure: whether it is not sure that fusing is faster: the host may be the slower one, or little is gained.
    """

    why_not: str = ""
    is_unsure: bool = False


def verdict(
    graph: fx.Graph,
    chains: Mapping[Chain, Judged],
    launches: Launches,
    *,
    measures: bool = False,
    before: Before = Before(),  # noqa: B008  # a tuple
) -> Verdict:
    """Estimate the times of the host and of the device, with and without fused calls, and decide.

    `chains`: all chains, also those that are not worth a fused call. `measures`: the caller of the graph may run the
    original model instead, and measures which is faster; so chains are fused if it is not sure. `before`: the
    additional time of the original graph, if products were replaced by others.
    """
    taken = {chain: judged for chain, judged in chains.items() if not judged.why_not}
    on_gpu = any(judged.fallback_us for judged in chains.values())
    if not taken or not on_gpu or launches in (Launches.CUDA_GRAPH, Launches.INDUCTOR_GRAPH):
        return Verdict()
    kernels = _kernels(graph)
    in_chains = {node for chain in chains for node in chain.nodes}
    others = [node for node in kernels if node not in in_chains]
    behind = {chain: [node for node in chain.nodes[1:] if node in kernels] for chain in chains}

    plain_us = {chain: profit.plain_us(judged, behind[chain]) for chain, judged in chains.items()}
    device_us = sum(plain_us.values()) + sum(map(costs.device_us, others))
    gained_us = sum(plain_us[chain] - judged.fused_us for chain, judged in taken.items())
    operators = len(others) + sum(map(len, behind.values()))
    host_us = _KERNEL_US[launches] * (len(chains) + operators / _OPERATORS_A_KERNEL[launches])
    more_us = _GRAPH_US[launches] + sum(_CALL_US[launches][judged.way] for judged in taken.values())
    more_us += _RECORDED_US * sum(
        chain.product.value.requires_grad for chain, judged in taken.items() if judged.way is Way.TWO_KERNELS
    )
    if launches is Launches.EAGER:  # Inductor has merged these kernels with others
        more_us -= _KERNEL_US[launches] * sum(len(behind[chain]) for chain in taken)
    plain_host_us = host_us + _KERNEL_US[launches] * before.kernels
    fused, plain = (
        max(device_us - gained_us, host_us + more_us),
        max(device_us + before.device_us, plain_host_us),
    )
    pays = host_us + more_us < device_us - gained_us or fused < _WORTH * plain
    is_recorded = any(chain.product.value.requires_grad for chain in taken)  # the backward pass is not timed
    is_close = _HOSTS_ERROR * (host_us + more_us) > device_us - gained_us or fused > _SURE * plain
    is_unsure = measures and not is_recorded and is_close
    if is_unsure and fused < _LOST * plain:
        return Verdict("", is_unsure)
    return Verdict("" if pays else WAITS)


def guard_sizes(graph: fx.Graph) -> None:
    """Add guards so that Dynamo compiles another graph for calls whose sizes are far from those of this call.

    A graph serves all sizes for which it has symbols, but what to fuse was decided for the present sizes.
    """
    given = (node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder")
    sizes = [size for size in given if isinstance(size, torch.SymInt) and size.node.has_hint()]
    if sizes:
        together, now = math.prod(sizes), math.prod(map(hint, sizes))
        bool(together <= _FAR * now) and bool(_FAR * together > now)  # each comparison becomes a guard


def _kernels(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that launch a kernel: those that run more than views."""
    calls = (node for node in graph.nodes if node.op.startswith("call") and tensor_of(node) is not None)
    return {node for node in calls if not effects_of(node).is_view}
