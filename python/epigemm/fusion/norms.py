"""BatchNorm by the batch's own statistics behind a product: one call for both, and for a scale and a ReLU.

Such a BatchNorm is no part of a chain, because it is not pointwise. A call replaces the product, perhaps a vector that
scales its columns, the BatchNorm, and perhaps a ReLU. It takes the place of the BatchNorm, where everything that it
reads has been computed. `epigemm.batch_statistics` makes the call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm import batch_statistics
from epigemm import route as _route
from epigemm.arguments.calls import LinearCall
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls.batch_norm import Norm, Running
from epigemm.epilogues.library import BIAS
from epigemm.fusion import profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.effects import is_quiet
from epigemm.fusion.operands import arguments_of
from epigemm.fusion.profit import Judged
from epigemm.fusion.site import FusedCall
from epigemm.fusion.values import known, storage_of, tensor_of, value_at

_PRODUCTS_OF_TWO: tuple[Any, ...] = (operator.mul, torch.mul, "mul")
_RELUS: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_VECTORS = ("weight", "bias", "running_mean", "running_var")
# The device's time, by the planner and by bytes, that pays for a node in Python in place of three in C++. With less the
# GPU may wait for the host. Counted, not measured: a call makes about ten steps on the host (the node, three launches,
# the tensors that they write, two views), each taken as 10 us, which is what an operator takes on a slow host.
_LEAST_US = 100.0


class Found(NamedTuple):
    """A product with a BatchNorm behind it.

    Attributes:
        chain: the product, perhaps with its scale.
        scale: a vector that scales the product's columns.
        norm: the BatchNorm.
        given: its arguments by name.
        relu: the ReLU behind it.
    """

    chain: Chain
    scale: fx.Node | None
    norm: fx.Node
    given: Mapping[str, Any]
    relu: fx.Node | None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What the call replaces."""
        return (*self.chain.nodes, self.norm, *([] if self.relu is None else [self.relu]))

    @property
    def sources(self) -> tuple[fx.Node | None, ...]:
        """The arguments of the call."""
        product = self.chain.product
        return product.x, product.weight, product.bias, self.scale, *(self.given[name] for name in _VECTORS)

    @property
    def function(self) -> str:
        """The name of what it computes."""
        return "linear_batch_norm" if self.relu is None else "linear_batch_norm_relu"

    @property
    def text(self) -> str:
        """What it computes."""
        text = "acc" if self.chain.product.bias is None else "acc + c1"
        if self.scale is not None:
            text = f"{text} * scale" if self.chain.product.bias is None else f"({text}) * scale"
        text = f"batch_norm({text})"
        return text if self.relu is None else f"relu({text})"


class NormSite(FusedCall):
    """The call that replaces them."""

    def __init__(self, found: Found) -> None:
        super().__init__("linear_batch_norm", __name__)
        self._momentum, self._eps = found.given["momentum"], found.given["eps"]
        self._relu = found.relu is not None

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
        product = LinearCall(BIAS, x, weight, (bias,))
        norm = Norm(scale, bn_weight, bn_bias, self._eps, self._relu)
        found = batch_statistics.linear_batch_norm(BatchNormCall(product, norm, running))
        if found is not None:
            return found
        z = _route.linear(BIAS, x, weight, (bias,))
        z = z if scale is None else z * scale
        y = F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, True, self._momentum, self._eps)
        return torch.relu(y) if self._relu else y


def find(finder: ChainFinder, judged: Mapping[Chain, Judged]) -> dict[Chain, Found]:
    """The products that a BatchNorm by batch statistics follows, and whose device pays for the call."""
    found: dict[Chain, Found] = {}
    for chain, estimate in judged.items():
        each = _behind(chain, finder) if estimate.both is None else None
        if each is not None and _pays(estimate, each):
            found[chain] = each
    return found


def _behind(chain: Chain, finder: ChainFinder) -> Found | None:
    product, last = chain.product, chain.nodes[-1]
    if product.is_kn or product.is_batch or product.value.dim() != 2 or len(chain.nodes) > 2:
        return None
    if product.is_scaled or chain.views or not product.adds_columns:
        return None
    scale = None if last is product.node else _scale_of(last, product.node)
    norm = _only_reader(last)
    if last is not product.node and scale is None:
        return None
    if norm is None or norm.target is not F.batch_norm or value_at(norm).dtype != product.value.dtype:
        return None
    given = arguments_of(norm)
    is_constant = isinstance(given["momentum"], float) and isinstance(given["eps"], float)
    if given["input"] is not last or given["training"] is not True or not is_constant:
        return None
    relu = _only_reader(norm)
    learns = value_at(norm).requires_grad
    if relu is None or relu.target not in _RELUS or value_at(relu).requires_grad != learns:
        relu = None
    found = Found(chain, scale, norm, given, relu)
    vectors = [node for node in found.sources[:-2] if node is not None]
    statistics = [each for name in _VECTORS[2:] if (each := given[name]) is not None]
    if not _memory_of(vectors).isdisjoint(_memory_of(statistics)):
        return None  # the kernel that updates them would read what it writes
    if learns and finder.is_written_after(norm, vectors):
        return None
    return found if is_quiet(product.node.next, norm, _memory_of([*vectors, *statistics])) else None


def _memory_of(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_of(value) for node in nodes if (value := tensor_of(node)) is not None}


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


def _pays(estimate: Judged, found: Found) -> bool:
    place = torch.empty(0, device=found.chain.product.value.device)
    if not batch_statistics.is_served(place):
        return False
    behind = found.nodes[1:]
    return place.is_cpu or estimate.fallback_us + sum(map(profit.device_us, behind)) > _LEAST_US
