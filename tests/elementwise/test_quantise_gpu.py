"""x in 8 bits by one kernel: the numbers and scales that PyTorch's operators make."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal import two_tensor

import epigemm
from epigemm.arguments import eight_bits
from epigemm.calls.elementwise_kernels import quantised
from tests.gpu.launching import DEVICE
from tests.ops.eight_bits import same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

SHAPES = [(1, 16), (3, 128), (7, 2064), (33, 4096), (513, 272), (9, 144), (2, 3, 144), (2000, 1040)]
DTYPES = eight_bits.RESULTS[:3]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of very different magnitudes; one of zeros, and a NaN and infinities in two others."""
    magnitudes = torch.randint(-12, 12, (*shape[:-1], 1), device=DEVICE).float().exp2()
    x = torch.randn(shape, device=DEVICE) * magnitudes
    rows = x.view(-1, shape[-1])
    if len(rows) > 3:
        rows[0], rows[1, 5], rows[2, 3], rows[2, 9] = 0, math.nan, math.inf, -math.inf
    return x.to(dtype)


@pytest.mark.parametrize(("dtype", "recipe"), [*product(DTYPES, eight_bits.RECIPES[1:])], ids=str)
def test_the_bits(dtype: torch.dtype, recipe: str) -> None:
    for shape in SHAPES:
        wide = drawn((*shape[:-1], shape[-1] + 16), dtype)
        for x in (drawn(shape, dtype), wide[..., : shape[-1]]):
            found = quantised(x, recipe)
            assert found is not None
            numbers, scales = eight_bits.by_recipe(x, recipe)  # of blocks, in rows
            assert same((found[0], found[1].reshape(scales.shape)), (numbers, scales))


def test_what_it_leaves_alone() -> None:
    """Rows that do not begin at whole 16 bytes, have gaps, other types or too many blocks; wrappers, traces."""
    x = drawn((48, 64), torch.bfloat16)
    wrapped: Any = two_tensor.TwoTensor
    for other in (x[:, 1:17], x.t(), x[:, :24], x[:0], x.double(), x.cpu(), x[0, 0], wrapped(x, x)):
        assert quantised(other, "row") is None
    assert quantised(x, "tensor") is None and quantised(x.new_empty(1, 2**24), "1x128") is None
    assert torch.func.vmap(lambda row: row if quantised(row, "row") is None else row[:1])(x).shape == x.shape


@pytest.mark.parametrize("recipe", ["row", "1x128"])
def test_a_layer_takes_it(recipe: str) -> None:
    """The same bits as with PyTorch's operators, which a compiled layer has."""
    layer = epigemm.nn.quantise(torch.nn.Linear(272, 144, device=DEVICE, dtype=torch.bfloat16), recipe)
    x = drawn((65, 272), torch.bfloat16)[3:]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        y = layer(x)
    kernel = "blocks_kernel" if recipe == "1x128" else "rows_kernel"
    assert any(kernel in event.name for event in seen.events())
    assert torch.equal(y, torch.compile(layer, backend="eager")(x))
