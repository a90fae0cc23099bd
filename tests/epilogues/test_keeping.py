"""Epilogues that also give the product: the built-in ones as programs, and what is added to the product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from epigemm.epilogues.keeping import keeping
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, Scalar
from epigemm.arguments.calls import LinearCall
from epigemm.autograd.gradients import keeps_product
from epigemm.epilogues.library import SCALE_BATCH_NORM
from epigemm.epilogues.registry import EPILOGUES, Epilogue, typed
from epigemm.epilogues.tracing.reference import reference_module


def product_of(epilogue: Epilogue, acc: Tensor, operands: list[Any]) -> Tensor:
    """The second value."""
    assert epilogue.traced.stored is not None
    tensors = [torch.as_tensor(each, dtype=acc.dtype) for each in operands]
    found: Tensor = reference_module(epilogue.traced.stored)(acc, *tensors)
    return found


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", sorted(EPILOGUES))
def test_built_in_ones(name: str, has_bias: bool, rng: torch.Generator) -> None:
    """All whose derivative reads the product: others save what they need without it."""
    epilogue = EPILOGUES[name]
    found = keeping(epilogue, has_bias=has_bias)
    x, weight = torch.empty(2, 2), torch.empty(2, 2)
    reads_product = epilogue.linear and keeps_product(LinearCall(epilogue, x, weight))
    assert (found is not None) == (reads_product and epilogue is not SCALE_BATCH_NORM)
    if found is None:
        return
    acc, bias = (torch.randn(size, generator=rng, dtype=torch.float64) for size in ((5, 4), (4,)))
    scalars = [1.5] if epilogue.scalar else []
    operands = [bias, *scalars] if has_bias else scalars
    wanted = epilogue.reference(acc, bias if has_bias else None, (), scalars)
    torch.testing.assert_close(found.traced.reference(acc, *operands), wanted)
    assert torch.equal(product_of(found, acc, operands), acc + bias if has_bias else acc)
    assert keeping(epilogue, has_bias=has_bias) is found


@epigemm.epilogue
def scaled(acc: Tensor, scale: Scalar, bias: PerColumn, other: Matrix) -> Tensor:
    return torch.tanh(acc + bias) * scale + other


@epigemm.epilogue
def of_sums(acc: Tensor, bias: PerColumn) -> Tensor:
    """The bias is read twice, and is none of the product's."""
    return torch.tanh(acc + bias) * bias


@pytest.mark.parametrize("is_wide", [False, True])
def test_of_functions(is_wide: bool, rng: torch.Generator) -> None:
    """The bias is part of the product where it is part of the product of two kernels."""
    acc, bias, other = (
        torch.randn(size, generator=rng, dtype=torch.float64) for size in ((5, 4), (4,), (5, 4))
    )
    for function, operands in ((scaled, [0.5, bias, other]), (of_sums, [bias])):
        shared = [function is scaled and each is other for each in operands]
        epilogue: Epilogue = typed(
            function.traced, [not isinstance(each, Tensor) or is_wide for each in operands], shared
        )
        found = keeping(epilogue, has_bias=False)
        assert found is not None and found is keeping(epilogue, has_bias=False)
        assert found.operands == epilogue.operands
        torch.testing.assert_close(
            found.traced.reference(acc, *operands), function.traced.reference(acc, *operands)
        )
        has_bias = epilogue.bias_place is not None
        assert has_bias == (function is scaled and not is_wide)
        assert torch.equal(product_of(found, acc, operands), acc + bias if has_bias else acc)
