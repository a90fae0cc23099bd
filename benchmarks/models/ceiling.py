"""How fast a model could be: eager's time on the device, with every chain at its best plan's predicted time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

from epigemm.fusion import profit
from epigemm.fusion.chains import Chain
from epigemm.fusion.effects import effects_of
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.values import hint, tensor_of

# Of one of eager's kernels that is no product: what it takes at least, and its share of the nominal bandwidth; what it
# moves on an H200, where torch does not know the memory's clock.
_LEAST_US, _OF_NOMINAL, _BYTES_PER_US = 3.0, 0.62, 3e6


@dataclass
class Expected:
    """What is expected of the chains of a model.

    Attributes:
        chains: by product, the microseconds of eager and of the best plan. One that is judged twice, such as before and
            after a change of layouts, counts once.
        error: what kept them from being known, if anything did.
    """

    chains: dict[fx.Node, tuple[float, float]] = field(default_factory=dict)
    error: Exception | None = None


@contextmanager
def watched() -> Iterator[Expected]:
    """In the block, what is fused tells of each chain what it is expected to take."""
    found = Expected()
    real: Any = profit.judged

    def judged(chain: Chain, *args: Any, **kwargs: Any) -> Judged:
        result: Judged = real(chain, *args, **kwargs)
        try:
            if result.fallback_us:
                found.chains[chain.product.node] = expected_us(chain, result, bytes_per_us())
        except Exception as error:  # which must not change what is fused
            found.error = error
        return result

    with mock.patch.object(profit, "judged", judged):
        yield found


def expected_us(chain: Chain, judged: Judged, bytes_per_us: float) -> tuple[float, float]:
    """Of a chain operator by operator, and by its best plan.

    The planner's fallback is PyTorch's product and one kernel for all that follows; eager has one for each operator.
    """
    behind = [node for node in chain.nodes[1:] if not effects_of(node).is_view]
    kernels = sorted(_kernel_us(node, bytes_per_us) for node in behind)
    # A fallback that is taken is a product with its ReLU in one kernel.
    is_one_kernel = judged.way is Way.FALLBACK and not judged.why_not
    plain = judged.fallback_us + sum(kernels if is_one_kernel else kernels[:-1])
    return plain, min(plain, judged.fused_us)


def ceiling(eager_ms: float, chains: Sequence[tuple[float, float]]) -> float:
    """Eager's time on the device over the same with every chain at its best plan.

    Eager takes E, of that its chains p1 + p2 + ... = P, the rest E - P. What is left is E - P + sum of min(pi, bi),
    where bi is what the best plan of a chain takes. E is measured, pi and bi are predictions.

    The chains are a part of eager's call: P cannot exceed E. Predictions that do are too high by at least P / E, and
    each counts for E / P of itself. Then the rest is nothing, and the ceiling E over the sum of min(pi E / P, bi).
    The predictions bi stay as they are: they come from other models, and nothing measured contradicts them.

    Args:
        eager_ms: measured, above 0.
        chains: microseconds of eager and of the best plan, see `Expected`.
    """
    eager_us, plain_us = 1e3 * eager_ms, sum(plain for plain, _ in chains)
    share = min(1.0, eager_us / plain_us) if plain_us else 1.0
    left_us = eager_us - share * plain_us + sum(min(share * plain, best) for plain, best in chains)
    return eager_us / left_us


def bytes_per_us() -> float:
    """What a pointwise kernel of PyTorch's moves on the present GPU."""
    properties: Any = torch.cuda.get_device_properties()
    clock_khz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return _OF_NOMINAL * 2 * clock_khz * bits / 8 / 1e3 or _BYTES_PER_US


def _kernel_us(node: fx.Node, bytes_per_us: float) -> float:
    tensors = [tensor_of(each) for each in (node, *node.all_input_nodes)]
    sizes = [math.prod(map(hint, t.shape)) * t.element_size() for t in tensors if t is not None]
    return _LEAST_US + sum(sizes) / bytes_per_us
