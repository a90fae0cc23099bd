"""BatchNorm by the batch's own statistics behind a product: one call for both, and for a scale and a ReLU.

Such a BatchNorm is no part of a chain, because it is not pointwise. A call replaces the product, perhaps a vector that
scales its columns, the BatchNorm, and perhaps a ReLU. It takes the place of the BatchNorm, where everything that it
reads has been computed. `epigemm.batch_statistics` makes the call.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm import batch_statistics
from epigemm import route as _route
from epigemm.arguments.precision import DEFAULT
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.batch_statistics import Vectors
from epigemm.calls.batch_norm import Running
from epigemm.epilogues.library import BIAS
from epigemm.fusion import costs, matmuls
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.effects import effects_of
from epigemm.fusion.profit import Judged
from epigemm.fusion.values import known, storage_of, tensor_of, value_at
from epigemm.packs import weight_packs

_PRODUCTS_OF_TWO: tuple[Any, ...] = (operator.mul, torch.mul, "mul")
_RELUS: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_VECTORS = ("weight", "bias", "running_mean", "running_var")
# The device's time, by the planner and by bytes, that pays for a node in Python in place of three in C++. With less the
# GPU may wait for the host. Counted, not measured: a call makes about ten steps on the host (the node, three launches,
# the tensors that they write, two views), each taken as 10 us, which is what an operator takes on a slow host.
_LEAST_US = 100.0


class Found(NamedTuple):
    """A product with a BatchNorm behind it."""

    product: fx.Node
    scaled: fx.Node | None  # the product times a vector
    norm: fx.Node
    relu: fx.Node | None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What the call replaces."""
        return tuple(node for node in self if node is not None)


class NormSite:
    """The call that replaces them."""

    def __init__(self, *, momentum: float, eps: float, relu: bool, keeps_pack: bool) -> None:
        self._momentum, self._eps, self._relu = momentum, eps, relu
        self._pack_use = weight_packs.KEEP if keeps_pack else weight_packs.FIND
        # torch.fx writes these two attributes into the code of a graph.
        self.__name__, self.__module__ = "fused_linear_batch_norm", __name__

    def __repr__(self) -> str:
        return "<fused linear_batch_norm>"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
    ) -> Tensor:
        """batch_norm((x @ weight.T + bias) * scale), or its ReLU; the running statistics follow."""
        running = Running(running_mean, running_var, None, self._momentum)
        call = BatchNormCall(running, self._eps, self._relu, DEFAULT, self._pack_use, False)
        found = batch_statistics.linear_batch_norm(x, weight, bias, Vectors(scale, bn_weight, bn_bias), call)
        if found is not None:
            return found
        z = _route.linear(BIAS, x, weight, (bias,), None, None, False, self._pack_use)
        z = z if scale is None else z * scale
        y = F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, True, self._momentum, self._eps)
        return torch.relu(y) if self._relu else y


def find(graph: fx.Graph, judged: Mapping[Chain, Judged]) -> dict[Chain, Found]:
    """The products that a BatchNorm by batch statistics follows, and whose device pays for the call."""
    finder, found = ChainFinder(graph), {}
    for chain, estimate in judged.items():
        each = _behind(chain, finder) if estimate.both is None else None
        if each is not None and _pays(chain, estimate, each):
            found[chain] = each
    return found


def replace(graph: fx.Graph, found: Found, *, keeps_pack: bool) -> fx.Node:
    """Put the call into a graph, whose other chains have been replaced."""
    product = matmuls.understand(found.product)
    assert isinstance(product, matmuls.Product)
    given = _arguments_of(found.norm)
    site = NormSite(
        momentum=given["momentum"], eps=given["eps"], relu=found.relu is not None, keeps_pack=keeps_pack
    )
    scale = None if found.scaled is None else _scale_of(found.scaled, found.product)
    tail = found.relu or found.norm
    with graph.inserting_before(found.norm):
        arguments = (product.x, product.weight, product.bias, scale, *(given[name] for name in _VECTORS))
        fused = graph.call_function(site, arguments)
    fused.meta = {
        key: found.norm.meta[key] for key in ("stack_trace", "nn_module_stack") if key in found.norm.meta
    }
    fused.meta["example_value"] = tail.meta["example_value"]
    tail.replace_all_uses_with(fused)
    for node in reversed(found.nodes):
        graph.erase_node(node)
    return fused


def text_of(found: Found, *, has_bias: bool) -> str:
    """What the call computes."""
    text = "acc + c1" if has_bias else "acc"
    if found.scaled is not None:
        text = f"({text}) * scale" if has_bias else f"{text} * scale"
    text = f"batch_norm({text})"
    return text if found.relu is None else f"relu({text})"


def _behind(chain: Chain, finder: ChainFinder) -> Found | None:
    product, last = chain.product, chain.nodes[-1]
    scaled = last if len(chain.nodes) == 2 else None
    if product.is_kn or product.is_batch or product.value.dim() != 2 or len(chain.nodes) > 2:
        return None
    if product.is_scaled or chain.views or not _is_vector(product.bias):
        return None
    if scaled is not None and _scale_of(scaled, product.node) is None:
        return None
    norm = _only_reader(last)
    if norm is None or norm.target is not F.batch_norm or value_at(norm).dtype != product.value.dtype:
        return None
    given = _arguments_of(norm)
    is_constant = isinstance(given["momentum"], float) and isinstance(given["eps"], float)
    if given["input"] is not last or given["training"] is not True or not is_constant:
        return None
    relu = _only_reader(norm)
    learns = value_at(norm).requires_grad
    if relu is None or relu.target not in _RELUS or value_at(relu).requires_grad != learns:
        relu = None
    scale = None if scaled is None else _scale_of(scaled, product.node)
    reads = [product.x, product.weight, product.bias, scale, *(given[name] for name in _VECTORS)]
    if _do_statistics_share(given, reads):
        return None
    is_kept = not learns or not finder.is_written_after(
        norm, [each for each in reads[:-2] if each is not None]
    )
    found = Found(product.node, scaled, norm, relu)
    return found if is_kept and not _is_written(found, reads) else None


def _is_vector(bias: object) -> bool:
    """Whether a product's bias is one for each column, or absent: `addmm` also takes matrices."""
    value = tensor_of(bias)
    return value is None or value.dim() == 1


def _do_statistics_share(given: Mapping[str, Any], reads: Sequence[fx.Node | None]) -> bool:
    """Whether a running statistic shares memory with what the kernel that updates it reads."""
    running = [tensor_of(given[name]) for name in ("running_mean", "running_var")]
    kept = {storage_of(value) for value in running if value is not None}
    others = [tensor_of(each) for each in reads if each not in (given["running_mean"], given["running_var"])]
    return any(value is not None and storage_of(value) in kept for value in others)


def _only_reader(node: fx.Node) -> fx.Node | None:
    (reader,) = node.users if len(node.users) == 1 else (None,)
    return None if reader is None or tensor_of(reader) is None else reader


def _scale_of(node: fx.Node, product: fx.Node) -> fx.Node | None:
    """The vector by which a node multiplies a product; None if it does something else."""
    if node.target not in _PRODUCTS_OF_TWO or len(node.args) != 2 or node.kwargs or product not in node.args:
        return None
    (vector,) = [each for each in node.args if each is not product] or [None]
    value, columns = tensor_of(vector), value_at(product).shape[-1]
    is_vector = value is not None and value.dim() == 1 and known(value.shape[0] == columns)
    return vector if is_vector and isinstance(vector, fx.Node) else None


def _arguments_of(norm: fx.Node) -> dict[str, Any]:
    bound = inspect.signature(F.batch_norm).bind(*norm.args, **norm.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_written(found: Found, reads: list[fx.Node | None]) -> bool:
    """Whether what the call reads may be written, or a mode changes, between the product and the BatchNorm."""
    memories = {storage_of(value) for node in reads if (value := tensor_of(node)) is not None}
    for node in _between(found.product, found.norm):
        effects = effects_of(node)
        if node is not found.scaled and (not effects.known or not memories.isdisjoint(effects.writes)):
            return True
    return False


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _pays(chain: Chain, estimate: Judged, found: Found) -> bool:
    place = torch.empty(0, device=chain.product.value.device)
    if not batch_statistics.is_served(place):
        return False
    return place.is_cpu or estimate.fallback_us + sum(map(costs.device_us, found.nodes[1:])) > _LEAST_US
