"""One fused call of a rewritten graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from epigemm import route as _route
from epigemm.calls import entry
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.registry import BIAS, Epilogue
from epigemm.fusion.chains import Chain
from epigemm.fusion.operands import ChainOperand
from epigemm.packs import weight_packs

_NO_BIAS = (None,)


class Site:
    """A chain as one call: of x, the weight, and the sources of the chain's operands in their order."""

    def __init__(self, chain: Chain, keeps_pack: bool) -> None:
        product = chain.product
        self._epilogue = chain.epilogue
        self._is_kn, self._is_batch = product.is_kn, product.is_batch
        # Kinds; of a BatchNorm its eps, and which of its vectors there are.
        self._operands: list[Any] = [
            each.kind if isinstance(each, ChainOperand) else (each.eps, [v is not None for v in each.sources])
            for each in chain.operands
        ]
        # Of what a view of the product in another order has beside it, by its place among the sources.
        self._orders: dict[int, tuple[str, tuple[int, ...]]] = {}
        place = 0
        for each in chain.operands:
            if isinstance(each, ChainOperand) and each.order is not None:
                self._orders[place] = each.kind, each.order
            place += sum(source is not None for source in each.sources)
        self._pack_use = weight_packs.KEEP if keeps_pack else weight_packs.FIND
        # Recorded calls, BatchNorms and operands of other shapes take the long way.
        self._is_direct = not product.value.requires_grad and chain.norm is None
        self._direct: Epilogue | None = None
        # torch.fx writes these two into the code of a graph.
        self.__name__, self.__module__ = f"fused_{chain.function}", __name__

    def __repr__(self) -> str:
        return f"<{self.__name__.replace('_', ' ', 1)}>"

    def __call__(self, x: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
        """Compute the chain."""
        if self._is_batch:
            weight = weight[0]
        if self._is_kn:
            weight = weight.t()
        if self._orders:
            sources = self._in_order(x, sources)
        if self._is_direct:  # most need nothing else, and the host is spared what follows
            epilogue = self._direct or self._find_direct(x, sources)
            seen = sources or _NO_BIAS if epilogue is BIAS else sources
            found = entry.linear(epilogue, x, weight, seen, None, None, None, self._pack_use, False)
            if isinstance(found, Tensor):
                return found
        rest, columns = iter(sources), weight.shape[0]
        given: list[Any] = []
        for operand in self._operands:
            if isinstance(operand, str):
                value, shape = next(rest), KINDS[operand].callers_shape(x.shape[:-1], columns)
                given.append(value if value.shape == shape else value.reshape(shape))
                continue
            eps, present = operand
            vectors = [next(rest) if there else None for there in present]
            if self._epilogue is None:
                folded = (given[0] if given else None, None, *vectors)
                return _route.linear_folded(x, weight, folded, eps, None, None, False, self._pack_use)
            given += _route.fold(x, (None, None, *vectors), eps, columns)
        if self._epilogue is None:
            bias = given[0] if given else None
            return _route.linear(BIAS, x, weight, bias, None, None, None, False, self._pack_use)
        return self._epilogue.call(x, weight, given, {}, None, None, False, self._pack_use)

    def _in_order(self, x: Tensor, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sources by the axes that the product has."""
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

    def _find_direct(self, x: Tensor, sources: tuple[Tensor, ...]) -> Epilogue:
        """The epilogue for the types of the operands, which are the same at each call of a graph."""
        self._direct = BIAS if self._epilogue is None else self._epilogue.of_linear(x, sources)
        return self._direct
