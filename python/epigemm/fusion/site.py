"""The fused calls of a rewritten graph."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm import batch_statistics
from epigemm import route as _route
from epigemm.arguments import forms
from epigemm.arguments.calls import UNSCALED, LinearCall, Scaled
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls import entry
from epigemm.calls.batch_norm import Norm, Running
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import Epilogue
from epigemm.fusion import profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.effects import is_quiet
from epigemm.fusion.matmuls import Scales
from epigemm.fusion.operands import arguments_of
from epigemm.fusion.profit import Judged
from epigemm.fusion.report import FusedSite
from epigemm.fusion.values import known, only_reader, storage_of, tensor_of, value_at
from epigemm.groups import grouped_linear

_NO_BIAS = (None,)


SITE = "epigemm_site"
"""The key in the `meta` of a fused call's node, for its entry of the report."""


class Replacement(NamedTuple):
    """A call that replaces nodes of a graph.

    Attributes:
        call: what is called.
        arguments: of the call.
        nodes: what it replaces, in order.
        site: its entry of the report.
        views: those of the nodes that give the result its shape.
        at: the node whose place it takes, if that is not the last one's.
    """

    call: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]
    site: FusedSite
    views: tuple[fx.Node, ...] = ()
    at: fx.Node | None = None


def name_of(node: fx.Node) -> str:
    """The name of a product's module, or of its node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = re.sub(r"^L(\['(self|fn|model)'\])?|__dict__\['_modules'\]|_modules|__self__", "", path)
    parts = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).split(".")
    return ".".join(filter(None, parts)) or node.name


class _OfEightBits:
    """What a call of a product of 8-bit numbers gets besides."""

    def __init__(self, chain: Chain, scales: Scales) -> None:
        # Which scales are one number; the result's type, and its scale if no argument; how sums are added.
        self._are_single = [known(value_at(each).numel() == 1) for each in chain.scales(scales)]
        if scales.are_blocks:
            self._are_single[:2] = [False, False]
        self._are_kn = scales.are_blocks and scales.is_kn
        self._dtype, self._accumulate = chain.dtype, scales.accumulate
        self._out_scale = chain.out_scale if isinstance(chain.out_scale, float) else None

    def taken(self, sources: tuple[Tensor, ...]) -> tuple[Scaled, tuple[Tensor, ...]]:
        """That, and the operands."""
        pairs = zip(sources, self._are_single, strict=False)
        given = [each.reshape(()) if is_single and each.dim() else each for each, is_single in pairs]
        out_scale = given[2] if len(given) > 2 else self._out_scale
        of_weight = given[1][: given[0].shape[-1]].t() if self._are_kn else given[1]
        scaled = (given[0], of_weight, self._dtype, self._accumulate, out_scale)
        # No result has a gradient, though gradients may be on and an operand have one: of a comparison.
        return scaled, tuple([each.detach() for each in sources[len(given) :]])


class Site:
    """A chain as one call, with x, the weight, and the sources of the chain's operands as arguments."""

    def __init__(self, chain: Chain) -> None:
        # torch.fx writes these two attributes into the code of a graph.
        self.__name__, self.__module__ = f"fused_{chain.function}", __name__
        product = chain.product
        self._epilogue = chain.epilogue
        self._is_kn, self._is_batch = product.is_kn, product.is_batch
        # The operands' kinds; for a BatchNorm its eps, and which of its vectors exist.
        self._operands: list[Any] = [
            (each.eps, [v is not None for v in each.sources]) if each.eps is not None else each.kind
            for each in chain.operands
        ]
        of_sources = [each for each in chain.operands for source in each.sources if source is not None]
        # The order of axes of operands next to a view of the product with reordered axes, by their positions.
        self._orders = {
            place: (each.kind, each.order) for place, each in enumerate(of_sources) if each.order is not None
        }
        # The positions of matrices that share rows. Their call needs the leading axes beside which they are read.
        self._shared = [place for place, each in enumerate(of_sources) if each.shared]
        self._splits_rows = chain.splits_rows
        self._of_8_bits = None if product.scales is None else _OfEightBits(chain, product.scales)
        # Recorded calls, BatchNorms, 8 bits and operands of other shapes need more work.
        self._is_direct = not (product.value.requires_grad or chain.norm or self._of_8_bits)
        self._is_grouped = product.ends is not None
        self._direct: Epilogue | None = None

    def __repr__(self) -> str:
        return f"<{self.__name__.replace('_', ' ', 1)}>"

    def __call__(self, x: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
        """Compute the chain."""
        if self._is_grouped:
            if self._orders:
                sources = (sources[0], *self._in_order(x, sources[1:]))
            return self._in_groups(x, weight.transpose(1, 2), *sources)
        if self._is_batch:
            weight = weight[0]
        if self._is_kn:
            weight = weight.t()
        scaled = UNSCALED
        if self._of_8_bits is not None:
            scaled, sources = self._of_8_bits.taken(sources)
        if self._orders:
            sources = self._in_order(x, sources)
        if self._splits_rows:
            parts, given = self._split(x, weight, sources)
            return unflattened(self._run(parts, weight, given, scaled), (*x.shape[:-1], weight.shape[0]))
        return self._run(x, weight, sources, scaled)

    def _run(self, x: Tensor, weight: Tensor, sources: tuple[Tensor, ...], scaled: Scaled) -> Tensor:
        if self._is_direct:  # most calls need nothing else, which saves the host's time
            made = self._epilogue
            if self._direct is None:  # the operands' types are the same at each call of a graph
                self._direct = BIAS if made is None else forms.of_types(made.traced, x, sources)
            epilogue = self._direct
            seen = sources or _NO_BIAS if epilogue.is_bias else sources
            found = entry.linear(epilogue, x, weight, seen, None, None, None, False)
            if isinstance(found, Tensor):
                return found
        rest, columns = iter(sources), weight.shape[0]
        given: list[Any] = []
        lead = x.shape[:-1]
        for operand in self._operands:
            if isinstance(operand, str):
                value, shape = next(rest), KINDS[operand].callers_shape(lead, columns)
                fits = value.shape == shape or KINDS[operand].shares_rows(value.shape, lead, columns)
                given.append(value if fits else value.reshape(shape))
                continue
            eps, present = operand
            vectors = [next(rest) if there else None for there in present]
            if self._epilogue is None:
                folded = (given[0] if given else None, None, *vectors)
                return _route.linear_folded(x, weight, folded, eps)
            given += _route.fold(x, (None, None, *vectors), eps, columns)
        if self._epilogue is None:
            bias = given[0] if given else None
            return _route.linear(BIAS, x, weight, (bias,), scaled=scaled)
        traced = self._epilogue.traced
        return _route.linear(traced, x, weight, given, scaled=scaled, promotes=False)

    def _in_groups(self, x: Tensor, weight: Tensor, ends: Tensor, *sources: Tensor) -> Tensor:
        """A chain of rows in groups, whose vectors are those of all groups."""
        groups, columns = weight.shape[:2]
        given: list[Tensor | None] = [None] if self._epilogue is None else []
        for kind, value in zip(self._operands, sources, strict=True):
            value = value.reshape(KINDS[kind].callers_shape(x.shape[:-1], columns))
            given.append(value.expand(groups, columns).contiguous() if KINDS[kind].is_of_columns else value)
        if self._epilogue is None:
            return grouped_linear(x, weight, offs=ends)
        return self._epilogue(x, weight, *given, offs=ends)

    def _in_order(self, x: Tensor, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sources with their axes in the product's order."""
        given = list(sources)
        for place, (kind, order) in self._orders.items():
            value = given[place]
            while value.dim() < len(order):
                value = value.unsqueeze(0)
            value = value.permute(order)
            if KINDS[kind].lacks_last_axis and value.dim() == x.dim():
                value = value.expand(*x.shape[:-1], 1)
            given[place] = value
        return tuple(given)

    def _split(
        self, x: Tensor, weight: Tensor, sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x with its rows in as many axes as matrices that share rows need, and these with the same axes.

        Matrices with 4 and with 20 of 100 rows: `[4, 5, 5, K]`, `[4, 1, 1, N]` and `[4, 5, 1, N]`.
        """
        counts = {place: math.prod(sources[place].shape[:-1]) for place in self._shared}
        # Equal counts stay, as axes of size 1: a symbolic size cannot be in a set.
        ends = [*sorted(counts.values()), math.prod(x.shape[:-1])]
        lead = [end // (before if before != 0 else 1) for before, end in zip([1, *ends], ends, strict=False)]
        given = list(sources)
        for place, count in counts.items():
            kept = ends.index(count) + 1
            ones = [1] * (len(lead) - kept)
            given[place] = sources[place].reshape(*lead[:kept], *ones, weight.shape[0])
        return x.reshape(*lead, x.shape[-1]), tuple(given)


# --- BatchNorm by the batch's own statistics --------------------------------------------------------------------------

# It is no part of a chain, because it is not pointwise. A call replaces the product, perhaps a vector that scales its
# columns, the BatchNorm, and perhaps a ReLU. It takes the place of the BatchNorm, where everything that it reads has
# been computed. `epigemm.batch_statistics` makes the call.


_PRODUCTS_OF_TWO: tuple[Any, ...] = (operator.mul, torch.mul, "mul")
_RELUS: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_OWN_STATISTICS = "by the batch's own statistics: one pass for the product with them, one that normalises"
# The device's time, by the planner and by bytes, that pays for a node in Python in place of three in C++. With less the
# GPU may wait for the host. Counted, not measured: a call makes about ten steps on the host (the node, three launches,
# the tensors that they write, two views), each taken as 10 us, which is what an operator takes on a slow host.
_LEAST_US = 100.0


def fused_linear_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> Tensor:
    """batch_norm((x @ weight.T + bias) * scale), or its ReLU; the running statistics follow."""
    running = Running(running_mean, running_var, None, momentum)
    product = LinearCall(BIAS, x, weight, (bias,))
    norm = Norm(scale, bn_weight, bn_bias, eps, relu)
    found = batch_statistics.linear_batch_norm(BatchNormCall(product, norm, running))
    if found is not None:
        return found
    z = _route.linear(BIAS, x, weight, (bias,))
    z = z if scale is None else z * scale
    y = F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, True, momentum, eps)
    return torch.relu(y) if relu else y


def find_normed(finder: ChainFinder, judged: Mapping[Chain, Judged]) -> dict[Chain, Replacement]:
    """The products that a BatchNorm by batch statistics follows, and whose device pays for the call."""
    found: dict[Chain, Replacement] = {}
    for chain, estimate in judged.items():
        each = _behind(chain, finder) if estimate.both is None else None
        if each is not None and _pays(estimate, chain, each.nodes[1:]):
            found[chain] = each
    return found


def _behind(chain: Chain, finder: ChainFinder) -> Replacement | None:
    product, last = chain.product, chain.nodes[-1]
    if product.is_kn or product.is_batch or product.value.dim() != 2 or len(chain.nodes) > 2:
        return None
    if product.is_scaled or product.scales is not None or chain.views or not product.adds_columns:
        return None
    scale = None if last is product.node else _scale_of(last, product.node)
    norm = only_reader(last)
    if last is not product.node and scale is None:
        return None
    if norm is None or norm.target is not F.batch_norm or value_at(norm).dtype != product.value.dtype:
        return None
    given = arguments_of(norm)
    is_constant = isinstance(given["momentum"], float) and isinstance(given["eps"], float)
    if given["input"] is not last or given["training"] is not True or not is_constant:
        return None
    relu = only_reader(norm)
    learns = value_at(norm).requires_grad
    if relu is None or relu.target not in _RELUS or value_at(relu).requires_grad != learns:
        relu = None
    vectors = [product.x, product.weight, product.bias, scale, given["weight"], given["bias"]]
    statistics = [given["running_mean"], given["running_var"]]
    if not _memory_of(vectors).isdisjoint(_memory_of(statistics)):
        return None  # the kernel that updates them would read what it writes
    if learns and finder.is_written_after(norm, vectors):
        return None
    if not is_quiet(product.node.next, norm, _memory_of([*vectors, *statistics])):
        return None
    nodes = (*chain.nodes, norm, *([] if relu is None else [relu]))
    arguments = (*vectors, *statistics, given["momentum"], given["eps"], relu is not None)
    text = "acc" if product.bias is None else "acc + c1"
    if scale is not None:
        text = f"{text} * scale" if product.bias is None else f"({text}) * scale"
    text, function = f"batch_norm({text})", "linear_batch_norm"
    if relu is not None:
        text, function = f"relu({text})", "linear_batch_norm_relu"
    matched = tuple(node.name for node in nodes)
    site = FusedSite(name_of(product.node), function, matched, text, (_OWN_STATISTICS,))
    return Replacement(fused_linear_batch_norm, arguments, nodes, site, at=norm)


def _memory_of(nodes: Iterable[fx.Node | None]) -> set[int]:
    return {storage_of(value) for node in nodes if (value := tensor_of(node)) is not None}


def _scale_of(node: fx.Node, product: fx.Node) -> fx.Node | None:
    """The vector by which a node multiplies a product; None if it does something else."""
    if node.target not in _PRODUCTS_OF_TWO or len(node.args) != 2 or node.kwargs or product not in node.args:
        return None
    (vector,) = [each for each in node.args if each is not product] or [None]
    value, columns = tensor_of(vector), value_at(product).shape[-1]
    is_vector = value is not None and value.dim() == 1 and known(value.shape[0] == columns)
    return vector if is_vector and isinstance(vector, fx.Node) else None


def _pays(estimate: Judged, chain: Chain, behind: Sequence[fx.Node]) -> bool:
    place = torch.empty(0, device=chain.product.value.device)
    if not batch_statistics.is_served(place):
        return False
    return place.is_cpu or estimate.fallback_us + sum(map(profit.device_us, behind)) > _LEAST_US
