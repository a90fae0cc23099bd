"""Kernels that store a second value for each element, by force: every tile, against float64 and against one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks.gradings.products import forced_into
from epigemm import Matrix, PerColumn, PerRow, ResultsEpilogue, UserEpilogue
from epigemm.epilogues.kinds import KINDS
from epigemm.epilogues.registry import typed
from tests.support import plans
from tests.support.cases import poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

Kernel = tuple[str, int, int, torch.dtype]
"""A family, its tile, the splits of K, and the type."""
DEVICE = torch.device("cuda")
HALVES = (torch.float16, torch.bfloat16)
KERNELS = [
    (family, tile, splits, dtype)
    for dtype in (*HALVES, torch.float32)
    for family, every in ((plans.TMA, (1,)), (plans.SWAP_AB, (1, 2, 8)))
    for tile in range(plans.tile_count(family, "tf32" if dtype is torch.float32 else "16_bits"))
    for splits in every
] or [(plans.TMA, 0, 1, torch.bfloat16)]
SHAPES = [
    # M, N, K: one row, ragged tiles, one stage of K and less, and more tiles than multiprocessors
    (1, 8, 64),
    (63, 200, 64),
    (65, 264, 136),
    (1000, 200, 72),
    (3333, 1032, 264),
    (65, 264, 1032),
]


@epigemm.epilogue
def gelu_beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = acc + bias
    return F.gelu(z), z


@epigemm.epilogue
def gelu_alone(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc + bias)


@epigemm.epilogue
def sum_alone(acc: Tensor, bias: PerColumn) -> Tensor:
    return acc + bias


@epigemm.epilogue
def every_kind(
    acc: Tensor, bias: PerColumn, factor: PerColumn, row: PerRow, other: Matrix, more: Matrix
) -> tuple[Tensor, Tensor]:
    """Each value reads what the other does not."""
    return (acc + bias) * row + more, acc - factor * other


@epigemm.epilogue
def all_vectors(
    acc: Tensor,
    bias: PerColumn,
    factor: PerColumn,
    shift: PerColumn,
    slope: PerColumn,
    row: PerRow,
    more: PerRow,
    other: Matrix,
) -> tuple[Tensor, Tensor]:
    """The vectors take a slot's place."""
    return (acc + bias) * row + factor * other, acc + shift + slope * more


@epigemm.epilogue
def waves(acc: Tensor) -> tuple[Tensor, Tensor]:
    """Two functions with near forms."""
    return torch.sin(acc), torch.cos(acc)


@epigemm.epilogue
def far_waves(acc: Tensor) -> tuple[Tensor, Tensor]:
    """The same of numbers so large that fp16 has some that are beyond the near forms."""
    return torch.sin(acc * 30.0), torch.cos(acc * 30.0)


@epigemm.epilogue
def wave_beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    """The stored value has no near form."""
    return torch.sin(acc + bias), acc + bias


FUNCTIONS: dict[ResultsEpilogue, Callable[..., tuple[Tensor, Tensor]]] = {
    gelu_beside: lambda acc, bias: (F.gelu(acc + bias), acc + bias),
    every_kind: lambda acc, bias, factor, row, other, more: ((acc + bias) * row + more, acc - factor * other),
    all_vectors: lambda acc, bias, factor, shift, slope, row, more, other: (
        (acc + bias) * row + factor * other,
        acc + shift + slope * more,
    ),
    waves: lambda acc: (torch.sin(acc), torch.cos(acc)),
    wave_beside: lambda acc, bias: (torch.sin(acc + bias), acc + bias),
}


class Given(NamedTuple):
    """A call's tensors, and the plan."""

    x: Tensor
    weight: Tensor
    operands: list[Tensor]
    plan: list[int]

    @property
    def arithmetic(self) -> str:
        return "tf32" if self.x.dtype is torch.float32 else "ieee"


def draw(function: ResultsEpilogue, sizes: tuple[int, int, int], kernel: Kernel, scale: float) -> Given:
    m, n, k = sizes
    family, tile, splits, dtype = kernel

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    operands = [random(*KINDS[spec.kind].shape((m,), n)) for spec in function.traced.operands]
    weight = (torch.randn(n, k, device=DEVICE) * scale / k**0.5).to(dtype)
    return Given(random(m, k), weight, operands, plans.numbers(family, tile, splits=splits))


def both(function: ResultsEpilogue, given: Given, gap: int = 0) -> tuple[Tensor, Tensor]:
    """The results in the function's order."""
    pair = function.parts(given.x.dtype).pair
    assert pair is not None
    epilogue = typed(pair.traced, [False] * len(pair.places))
    shape = (given.x.shape[0], given.weight.shape[0] + gap)
    out = poisoned(shape, given.x.dtype, DEVICE)[:, : given.weight.shape[0]]
    stored = poisoned(out.shape, given.x.dtype, DEVICE)
    reads = pair.operands(given.operands)
    result = forced_into(
        out,
        epilogue.name,
        given.x,
        given.weight,
        given.arithmetic,
        operands=reads,
        plan=given.plan,
        stored=stored,
    )
    sources = function.parts(given.x.dtype).sources
    found = {pair.result: result, pair.stored: stored}
    return found[sources[0]], found[sources[1]]


def alone(function: UserEpilogue, given: Given) -> Tensor:
    out = poisoned((given.x.shape[0], given.weight.shape[0]), given.x.dtype, DEVICE)
    epilogue = typed(function.traced, [False] * len(given.operands))
    return forced_into(
        out,
        epilogue.name,
        given.x,
        given.weight,
        given.arithmetic,
        operands=given.operands,
        plan=given.plan,
    )


def fits(sizes: tuple[int, int, int], kernel: Kernel) -> bool:
    """Whether each split of K has a stage."""
    _, _, splits, dtype = kernel
    return splits <= -(-sizes[2] * dtype.itemsize // 128)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, magnitude: Tensor) -> None:
    """A rounding to `dtype` or a short function's error, and the product's: of sums in fp32, or of factors in TF32."""
    relative = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-10}[dtype]
    absolute = 2.0**-8 if dtype is torch.float32 else 2.0**-14
    wrong = ~((actual.double() - expected).abs() <= relative * expected.abs() + absolute * magnitude)
    assert not wrong.any(), f"{int(wrong.sum())} elements, the first {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("function", [gelu_beside, every_kind], ids=lambda each: each.traced.name)
def test_every_tile_against_float64(function: ResultsEpilogue, kernel: Kernel) -> None:
    compare(function, kernel)


@pytest.mark.parametrize(
    "kernel", [each for each in KERNELS if each[1] in (4, 5, 6) and each[2] == 1], ids=str
)
@pytest.mark.parametrize("function", [all_vectors, waves, wave_beside], ids=lambda each: each.traced.name)
def test_some_tiles_against_float64(function: ResultsEpilogue, kernel: Kernel) -> None:
    # A cosine in fp32 is long: no kernel stores it beside.
    if function is waves and kernel[3] is torch.float32:
        assert function.parts(torch.float32).pair is None
        return
    compare(function, kernel)


def compare(function: ResultsEpilogue, kernel: Kernel) -> None:
    torch.manual_seed(0)
    dtype = kernel[3]
    for sizes in SHAPES:
        if not fits(sizes, kernel):
            continue
        given = draw(function, sizes, kernel, scale=1.0)
        acc = given.x.double() @ given.weight.double().t()
        wide = [each.double() for each in given.operands]
        # Of what the terms of a result are made, as they may cancel.
        magnitude = 1 + acc.abs() + sum((each.abs() for each in wide), torch.zeros((), device=DEVICE))
        magnitude = magnitude * magnitude
        found = both(function, given)
        for actual, expected in zip(found, FUNCTIONS[function](acc, *wide), strict=True):
            assert_close(actual, expected, dtype, magnitude)
        for one, other in zip(found, both(function, given), strict=True):
            assert torch.equal(one, other), "two runs"


@pytest.mark.parametrize("kernel", [each for each in KERNELS if each[3] is torch.bfloat16], ids=str)
def test_the_bits_are_those_of_one_value(kernel: Kernel) -> None:
    """Also where the result's rows have gaps, which the stored matrix has not."""
    torch.manual_seed(0)
    for sizes in SHAPES:
        if not fits(sizes, kernel):
            continue
        given = draw(gelu_beside, sizes, kernel, scale=1.0)
        wanted = alone(gelu_alone, given), alone(sum_alone, given)
        for gap in (0, 8):
            found = both(gelu_beside, given, gap)
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]), (sizes, gap)


@pytest.mark.parametrize(
    "kernel", [each for each in KERNELS if each[3] is torch.float16 and each[2] == 1] or KERNELS[:1], ids=str
)
def test_both_near_forms(kernel: Kernel) -> None:
    """Some arguments are so large that a warp computes its elements again, of either value."""
    torch.manual_seed(0)
    m, n, k = 300, 264, 128
    given = draw(far_waves, (m, n, k), kernel, scale=1.0)
    eye = torch.eye(n, device=DEVICE).to(kernel[3])[:, :k].contiguous()  # acc is x, and 0 behind its columns
    x = given.x.clone()
    x[::7, ::5] = 60000.0
    x[20:90, :32] = 60000.0
    given = given._replace(x=x, weight=eye)
    angle = x.double() @ eye.double().t() * 30
    found = both(far_waves, given)
    for actual, expected in zip(found, (torch.sin(angle), torch.cos(angle)), strict=True):
        assert_close(actual, expected, kernel[3], torch.ones_like(angle))


@pytest.mark.parametrize("tile", range(plans.tile_count(plans.TMA, "16_bits")) or [0])
def test_again_and_again(tile: int) -> None:
    """The same bits at each of many launches in a row."""
    torch.manual_seed(0)
    given = draw(every_kind, (2049, 1544, 1000), (plans.TMA, tile, 1, torch.bfloat16), scale=1.0)
    first = both(every_kind, given)
    for _ in range(5):
        for one, other in zip(first, both(every_kind, given), strict=True):
            assert torch.equal(one, other)
