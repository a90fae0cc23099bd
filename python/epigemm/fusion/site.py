"""One fused call of a rewritten graph."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from epigemm import route as _route
from epigemm.arguments import forms
from epigemm.calls import entry
from epigemm.calls.layouts import unflattened
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import Epilogue
from epigemm.fusion.chains import Chain
from epigemm.fusion.operands import ChainOperand

_NO_BIAS = (None,)


class FusedCall:
    """A call that replaces nodes of a graph."""

    def __init__(self, name: str, module: str) -> None:
        # torch.fx writes these two attributes into the code of a graph.
        self.__name__, self.__module__ = f"fused_{name}", module

    def __repr__(self) -> str:
        return f"<{self.__name__.replace('_', ' ', 1)}>"


class Site(FusedCall):
    """A chain as one call, with x, the weight, and the sources of the chain's operands as arguments."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain.function, __name__)
        product = chain.product
        self._epilogue = chain.epilogue
        self._is_kn, self._is_batch = product.is_kn, product.is_batch
        # The operands' kinds; for a BatchNorm its eps, and which of its vectors exist.
        self._operands: list[Any] = [
            each.kind if isinstance(each, ChainOperand) else (each.eps, [v is not None for v in each.sources])
            for each in chain.operands
        ]
        # The order of axes of operands next to a view of the product with reordered axes, by their positions.
        self._orders: dict[int, tuple[str, tuple[int, ...]]] = {}
        # The positions of matrices that share rows. Their call needs the leading axes beside which they are read.
        self._shared: list[int] = []
        place = 0
        for each in chain.operands:
            if isinstance(each, ChainOperand) and each.order is not None:
                self._orders[place] = each.kind, each.order
            if isinstance(each, ChainOperand) and each.shared:
                self._shared.append(place)
            place += sum(source is not None for source in each.sources)
        self._splits_rows = chain.splits_rows
        # Recorded calls, BatchNorms and operands of other shapes need more work.
        self._is_direct = not product.value.requires_grad and chain.norm is None
        self._direct: Epilogue | None = None

    def __call__(self, x: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
        """Compute the chain."""
        if self._is_batch:
            weight = weight[0]
        if self._is_kn:
            weight = weight.t()
        if self._orders:
            sources = self._in_order(x, sources)
        if self._splits_rows:
            parts, given = self._split(x, weight, sources)
            return unflattened(self._run(parts, weight, given), (*x.shape[:-1], weight.shape[0]))
        return self._run(x, weight, sources)

    def _run(self, x: Tensor, weight: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
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
            return _route.linear(BIAS, x, weight, (bias,))
        traced = self._epilogue.traced
        return _route.linear(traced, x, weight, given, promotes=False)

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
