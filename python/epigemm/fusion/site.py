"""One fused call of a rewritten graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epigemm import call as _call
from epigemm import entry, packs
from epigemm.epilogues import BIAS, Epilogue
from epigemm.fusion.capture import Chain
from epigemm.fusion.operands import Norm, Operand
from epigemm.operand_kinds import KINDS
from epigemm.user_epilogue import UserEpilogue

_NO_BIAS = (None,)


class Site:
    """A chain as one call: of x, the weight, and the sources of the chain's operands in their order.

    Args:
        chain: what it computes.
        keep_packs: whether the weight may keep its fp16 slices between calls.
    """

    def __init__(self, chain: Chain, keep_packs: bool) -> None:
        product = chain.product
        self.function = function_name(chain)
        self.epilogue: UserEpilogue | None = chain.epilogue
        self._is_kn, self._is_batch = product.is_kn, product.is_batch
        self._has_bias = product.bias is not None
        self._operands = tuple(
            each.kind if isinstance(each, Operand) else (each.eps, tuple(v is not None for v in each.vectors))
            for each in chain.operands
        )
        self._pack_use = packs.KEEP if keep_packs else packs.FIND
        # Recorded calls, BatchNorms and operands of other shapes take the long way.
        self._is_direct = not product.value.requires_grad and all(isinstance(o, str) for o in self._operands)
        self._direct: Epilogue | None = None
        # torch.fx writes these two into the code of a graph.
        self.__name__, self.__module__ = f"fused_{self.function}", __name__

    def __repr__(self) -> str:
        return f"<fused {self.function}>"

    def __call__(self, x: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
        """Compute the chain."""
        if self._is_batch:
            weight = weight[0]
        if self._is_kn:
            weight = weight.t()
        if self._is_direct:
            found = self._at_once(x, weight, sources)
            if isinstance(found, Tensor):
                return found
        if self.epilogue is None:
            return self._built_in(x, weight, sources)
        given: list[Any] = []
        rest = iter(sources)
        for operand in self._operands:
            if isinstance(operand, str):
                given.append(_shaped(next(rest), operand, x, weight))
            else:
                eps, present = operand
                vectors = tuple(next(rest) if there else None for there in present)
                given += _call.fold(x, (None, None, *vectors), eps, weight.shape[0])
        return self.epilogue.call(x, weight, given, {}, None, None, False, self._pack_use)

    def _at_once(
        self, x: Tensor, weight: Tensor, sources: tuple[Tensor, ...]
    ) -> Tensor | entry.Recorded | None:
        """The call with its operands as they are: most need nothing else, and the host is spared what follows."""
        epilogue = self._direct or self._find_direct(x, sources)
        given = sources or _NO_BIAS if epilogue is BIAS else sources
        return entry.linear(epilogue, x, weight, given, None, None, None, self._pack_use, False)

    def _find_direct(self, x: Tensor, sources: tuple[Tensor, ...]) -> Epilogue:
        """The epilogue for the types of the operands, which are the same at each call of a graph."""
        if self.epilogue is None:
            found: Epilogue = BIAS
        elif self.epilogue.runs_built_in(sources, x):
            assert self.epilogue.copied is not None
            found = self.epilogue.copied
        else:
            found = self.epilogue.of_types(x, sources)
        self._direct = found
        return found

    def _built_in(self, x: Tensor, weight: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """The product and its bias, and perhaps a BatchNorm: functions of epigemm's own."""
        bias = sources[0].reshape(-1) if self._has_bias else None
        norms = [operand for operand in self._operands if not isinstance(operand, str)]
        if not norms:
            return _call.linear(BIAS, x, weight, bias, None, None, None, False, self._pack_use)
        eps, present = norms[0]
        rest = iter(sources[1:] if self._has_bias else sources)
        vectors = (bias, None, *(next(rest) if there else None for there in present))
        return _call.linear_folded(x, weight, vectors, eps, None, None, False, self._pack_use)


def sources_of(chain: Chain) -> list[Any]:
    """The nodes that a site of the chain is called with, x and the weight first."""
    found: list[Any] = [chain.product.x, chain.product.weight]
    for operand in chain.operands:
        if isinstance(operand, Norm):
            found += [vector for vector in operand.vectors if vector is not None]
        else:
            found.append(operand.source)
    return found


def function_name(chain: Chain) -> str:
    """What a chain computes, in one word."""
    if chain.epilogue is not None:
        steps = chain.formula.steps
        # The bias is the layer's own.
        named = type(chain.formula)(
            chain.formula.kinds, steps[1:] if chain.product.bias is not None else steps
        )
        return f"linear_{named.name}"
    norm = any(isinstance(operand, Norm) for operand in chain.operands)
    return "linear_batch_norm" if norm else "linear"


def _shaped(value: Tensor, kind: str, x: Tensor, weight: Tensor) -> Tensor:
    """An operand in the shape that an epilogue takes."""
    shape = KINDS[kind].callers_shape(x.shape[:-1], weight.shape[0])
    return value if value.shape == shape else value.reshape(shape)
