"""Whether the GPU waits for the host in a graph. If it does, fused calls gain only the host's time that they save.

A call takes as long as the slower of the two. All times are estimates. The device's time comes from the planner, and
for other operators from their FLOPs and bytes. The host's time comes from the number of kernels. Where autograd records
a graph, the times are those of a training step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
# The same where autograd records the graph: of a whole training step, for each product and each other kernel of its
# forward pass, and for each fused call, whose node is in Python. Eager's are what models took on an idle host (record
# `models-costs`): mlp-16 and SIREN 155 us a product and 54 an operator; a call on slices in twelve models 110 to 290 us
# more than a product, 195 in the middle; two kernels 220 with SIREN in bf16. A call on the tensors took 118 us more
# with one layer (`host`). For the fallback nothing was measured: it has one launch more than a call on the tensors.
# Inductor's are three times those above. Nothing was measured for it either.
_STEP_PRODUCT_US = {Launches.EAGER: 150.0, Launches.INDUCTOR: 60.0}
_STEP_KERNEL_US = {Launches.EAGER: 55.0, Launches.INDUCTOR: 60.0}
_STEP_CALL_US = {
    Launches.EAGER: {Way.TENSORS: 120.0, Way.SLICES: 195.0, Way.FALLBACK: 135.0, Way.TWO_KERNELS: 220.0},
    Launches.INDUCTOR: {Way.TENSORS: 42.0, Way.SLICES: 120.0, Way.FALLBACK: 42.0, Way.TWO_KERNELS: 42.0},
}
# Of the device: the backward pass of a product is two products. There is one less where x or the weight needs no
# gradient, which is not counted.
_STEP_PASSES = 3
# The host's additional time for a call of a fused model: guards, minus the calls of modules. Measured on a CPU (Python
# 3.11, torch 2.13) with nothing fused: 39, 36, 26 us for 1, 4, 12 linear layers with a GELU. It was 9 us for a model
# without operators. Inductor's graphs have the same guards without fused calls.
_GRAPH_US = {Launches.EAGER: 30.0, Launches.INDUCTOR: 0.0}
_WORTH = 0.97  # of the time without fusion: a smaller gain is within the error of these estimates
# The factor by which hosts differ; the share of the time below which a graph is sure to gain; and the share above which
# it is not tried. The second is far from 1, because estimates are worse at sizes to which nothing was fitted. What
# autograd records is not measured. So it has to gain on a slow host, too.
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
    plain, fused = _times(graph, chains, taken, launches, before)
    is_recorded = any(map(_is_recorded, taken))  # the backward pass is not timed
    is_close = _HOSTS_ERROR * fused.host_us > fused.device_us or fused.longer_us() > _SURE * plain.longer_us()
    is_unsure = measures and not is_recorded and is_close
    if is_unsure and fused.longer_us() < _LOST * plain.longer_us():
        return Verdict("", is_unsure)
    hosts = (1.0, _HOSTS_ERROR) if is_recorded and launches is Launches.EAGER else (1.0,)
    pays = all(_pays(plain, fused, slowness) for slowness in hosts)
    return Verdict("" if pays else WAITS)


class _Times(NamedTuple):
    """Microseconds of a call; of a training step where autograd records it."""

    device_us: float
    host_us: float

    def longer_us(self, slowness: float = 1.0) -> float:
        """What the call takes; `slowness`: the factor of the host's time."""
        return max(self.device_us, slowness * self.host_us)


def _pays(plain: _Times, fused: _Times, slowness: float) -> bool:
    """Whether the fused graph is faster, or the device, for which every fused chain gains, is what it waits for."""
    waits_for_device = slowness * fused.host_us < fused.device_us
    return waits_for_device or fused.longer_us(slowness) < _WORTH * plain.longer_us(slowness)


def _times(
    graph: fx.Graph,
    chains: Mapping[Chain, Judged],
    taken: Mapping[Chain, Judged],
    launches: Launches,
    before: Before,
) -> tuple[_Times, _Times]:
    """The estimates of the original graph, and of that in which the chains that are taken are fused."""
    kernels = _kernels(graph)
    in_chains = {node for chain in chains for node in chain.nodes}
    others = [node for node in kernels if node not in in_chains]
    behind = {chain: [node for node in chain.nodes[1:] if node in kernels] for chain in chains}

    plain_us = {chain: profit.plain_us(judged, behind[chain]) for chain, judged in chains.items()}
    device_us = sum(_passes(_is_recorded(chain)) * us for chain, us in plain_us.items())
    device_us += sum(_passes(_learns(node)) * costs.device_us(node) for node in others)
    gained_us = sum(
        _passes(_is_recorded(chain)) * (plain_us[chain] - judged.fused_us) for chain, judged in taken.items()
    )

    def kernels_us(nodes: Iterable[fx.Node]) -> float:
        return sum((_STEP_KERNEL_US if _learns(node) else _KERNEL_US)[launches] for node in nodes)

    operators_us = kernels_us(others) + sum(map(kernels_us, behind.values()))
    host_us = sum((_STEP_PRODUCT_US if _is_recorded(chain) else _KERNEL_US)[launches] for chain in chains)
    host_us += operators_us / _OPERATORS_A_KERNEL[launches]
    more_us = _GRAPH_US[launches] + sum(
        (_STEP_CALL_US if _is_recorded(chain) else _CALL_US)[launches][judged.way]
        for chain, judged in taken.items()
    )
    if launches is Launches.EAGER:  # Inductor has merged these kernels with others
        more_us -= sum(kernels_us(behind[chain]) for chain in taken)
    plain = _Times(device_us + before.device_us, host_us + _KERNEL_US[launches] * before.kernels)
    return plain, _Times(device_us - gained_us, host_us + more_us)


def _is_recorded(chain: Chain) -> bool:
    """Whether autograd records the chain's product."""
    return bool(chain.product.value.requires_grad)


def _learns(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.requires_grad


def _passes(is_recorded: bool) -> int:
    return _STEP_PASSES if is_recorded else 1


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
