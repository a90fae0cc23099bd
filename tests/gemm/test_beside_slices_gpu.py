"""Results beside those of products on fp16 slices, by force: statistics and second values, of every tile.

Some rows are rejected by the range check. The fixup computes their results again, and all that follows from them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks.gradings.products import forced_into
from epigemm import Matrix, PerColumn, PerRow, ResultsEpilogue
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.registry import typed
from tests.support import plans
from tests.support.cases import poisoned
from tests.support.moments import assert_close, poison_free_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
TILES = [
    (arithmetic, tile)
    for arithmetic in ("split", "scaled")
    for tile in range(plans.tile_count(plans.FP16X3, arithmetic))
] or [("split", 0)]
SHAPES = [
    # M, N, K: one row, ragged blocks and tiles, one stage of K and less, and more tiles than multiprocessors
    (1, 8, 64),
    (63, 200, 64),
    (65, 264, 136),
    (129, 8, 8),
    (1000, 200, 72),
    (3333, 1032, 264),
    (2048, 4096, 512),
]


@epigemm.epilogue
def gelu_beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = acc + bias
    return F.gelu(z), z


@epigemm.epilogue
def every_kind(
    acc: Tensor, bias: PerColumn, factor: PerColumn, row: PerRow, other: Matrix, more: Matrix
) -> tuple[Tensor, Tensor]:
    """Each value reads what the other does not."""
    return (acc + bias) * row + more, acc - factor * other


FUNCTIONS: dict[ResultsEpilogue, Callable[..., tuple[Tensor, Tensor]]] = {
    gelu_beside: lambda acc, bias: (F.gelu(acc + bias), acc + bias),
    every_kind: lambda acc, bias, factor, row, other, more: ((acc + bias) * row + more, acc - factor * other),
}


def draw(sizes: tuple[int, int, int], rejected: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """x and the weight. Of the rejected rows of x all elements but the last are too small for slices."""
    m, n, k = sizes
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE) * k**-0.5
    for row in rejected:
        x[row] *= 2.0**-40
        x[row, -1] = 1.0
        weight[::3, -1] = 0.0  # where only the small elements count
    return x, weight


def with_moments(
    x: Tensor, weight: Tensor, bias: Tensor, kernel: tuple[str, int]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The result, and the mean and the variance of its columns."""
    m, n = len(x), len(weight)
    out = poisoned((m, n), torch.float32, DEVICE)
    mean, variance = columns = torch.full((2, n), float("nan"), device=DEVICE)
    poison_free_memory(DEVICE, 1 + (m * n >> 18))
    plan = plans.numbers(plans.FP16X3, kernel[1])
    forced_into(out, "bias", x, weight, kernel[0], bias=bias, plan=plan, moments=columns)
    return out, (mean, variance)


def check_moments(x: Tensor, weight: Tensor, bias: Tensor, kernel: tuple[str, int]) -> Tensor:
    """Twice, with the same bits."""
    (out, found), (again, others) = (with_moments(x, weight, bias, kernel) for _ in range(2))
    assert_close(out, *found)
    for one, other in zip((out, *found), (again, *others), strict=True):
        assert torch.equal(one, other), "two runs"
    return out


@pytest.mark.parametrize("kernel", TILES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_moments_of_every_tile(offset: float, kernel: tuple[str, int]) -> None:
    torch.manual_seed(0)
    for sizes in SHAPES:
        x, weight = draw(sizes)
        bias = torch.randn(sizes[1], device=DEVICE) + offset
        out = check_moments(x, weight, bias, kernel)
        plain = forced_into(
            torch.empty_like(out),
            "bias",
            x,
            weight,
            kernel[0],
            bias=bias,
            plan=plans.numbers(plans.FP16X3, kernel[1]),
        )
        assert torch.equal(out, plain)


@pytest.mark.parametrize("kernel", TILES, ids=str)
@pytest.mark.parametrize("sizes", [(1000, 264, 256), (130, 72, 512), (129, 1032, 1024)], ids=str)
def test_moments_of_results_that_are_computed_again(
    sizes: tuple[int, int, int], kernel: tuple[str, int]
) -> None:
    torch.manual_seed(0)
    rejected = (0, 5, 63, 64, 127, 128)
    x, weight = draw(sizes, rejected)
    out = check_moments(x, weight, torch.zeros(sizes[1], device=DEVICE), kernel)
    exact = x[list(rejected)].double() @ weight.double().t()
    of_small = out[list(rejected)][:, ::3].double(), exact[:, ::3]
    assert float((of_small[0] - of_small[1]).norm() / of_small[1].norm()) < 2.0**-20, (
        "nothing was computed again"
    )


@pytest.mark.parametrize("kernel", TILES, ids=str)
def test_infinities_and_nans(kernel: tuple[str, int]) -> None:
    """A mean is infinite where the sum is, and NaN of infinities of both signs; the variance is NaN, as PyTorch's."""
    torch.manual_seed(0)
    x, weight = draw((333, 264, 128))
    x[7, 3], x[70, 3], weight[9, 5] = float("inf"), float("-inf"), float("nan")
    out, (mean, variance) = with_moments(x, weight, torch.zeros(264, device=DEVICE), kernel)
    want = out.double().mean(0)
    special = ~want.isfinite()
    assert bool(special.any()) and torch.equal(variance.isnan(), special)
    assert torch.equal(mean[special].double().nan_to_num(7.0), want[special].nan_to_num(7.0))
    assert_close(out[:, ~special], mean[~special], variance[~special])


def both(
    function: ResultsEpilogue, x: Tensor, weight: Tensor, operands: list[Tensor], kernel: tuple[str, int]
) -> tuple[Tensor, Tensor]:
    """The results in the function's order."""
    pair = function.parts(torch.float32).pair
    assert pair is not None
    epilogue = typed(pair.traced, [False] * len(pair.places))
    out, stored = (poisoned((len(x), len(weight)), torch.float32, DEVICE) for _ in range(2))
    forced_into(
        out,
        epilogue.name,
        x,
        weight,
        kernel[0],
        operands=pair.operands(operands),
        plan=plans.numbers(plans.FP16X3, kernel[1]),
        stored=stored,
    )
    sources = function.parts(torch.float32).sources
    found = {pair.result: out, pair.stored: stored}
    return found[sources[0]], found[sources[1]]


@pytest.mark.parametrize("kernel", TILES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.traced.name)
@pytest.mark.parametrize("rejected", [(), (0, 5, 62)], ids=["plain", "rejected"])
def test_second_values(rejected: tuple[int, ...], function: ResultsEpilogue, kernel: tuple[str, int]) -> None:
    torch.manual_seed(0)
    for sizes in [each for each in SHAPES if each[0] > max(rejected, default=0) and each[2] > 8]:
        x, weight = draw(sizes, rejected)
        operands = [
            torch.randn(KINDS[spec.kind].shape(sizes[:1], sizes[1]), device=DEVICE)
            for spec in function.traced.operands
        ]
        found = both(function, x, weight, operands, kernel)
        wide = [each.double() for each in operands]
        acc = x.double() @ weight.double().t()
        # Of what the terms of a result are made, as they may cancel.
        terms = x.double().abs() @ weight.double().abs().t()
        magnitude = 1 + terms + sum((each.abs() for each in wide), torch.zeros((), device=DEVICE))
        # A rounding of a few factors, and the product's: of each factor to 22 bits, or to 11.
        unit = 2.0**-20 if kernel[0] == "split" else 2.0**-10
        for actual, expected in zip(found, FUNCTIONS[function](acc, *wide), strict=True):
            wrong = ~((actual.double() - expected).abs() <= unit * magnitude * magnitude)
            assert not wrong.any(), f"{sizes}: {int(wrong.sum())}, the first {wrong.nonzero()[0].tolist()}"
        for one, other in zip(found, both(function, x, weight, operands, kernel), strict=True):
            assert torch.equal(one, other), "two runs"
