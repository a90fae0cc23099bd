"""Functors with a near form, in every kernel of 16 bits: no, single and all elements are beyond its range.

The weight is the identity, so the accumulator is x itself, and each element's argument is known.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings.products import forced_into
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import elementwise_kernels, resolve_elementwise
from epigemm.epilogues.registry import typed
from epigemm.linker import loader
from epigemm.planner import plans as planned
from tests.support import plans

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
STEP = 0.0390625  # 1e5 is 2.56e6 of these, beyond 2^20
BY = 30.0  # fp16 numbers times this are beyond 1e5, too
TILES = [
    (family, tile)
    for family in (plans.TMA, plans.SWAP_AB, plans.MMA)
    for tile in range(plans.tile_count(family, "16_bits"))
] or [(plans.TMA, 0)]
PAIR_TILES = range(plans.tile_count(plans.TMA, "pairs")) or [0]
SLACK = 2.0**-15
"""Of a result or its terms: 2^-19 of an angle's function, some roundings of fp32, and of tan far away the angle's."""
types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@epigemm.epilogue
def sine(acc: Tensor, by: Scalar) -> Tensor:
    return torch.sin(acc * by)


@epigemm.epilogue
def cosine(acc: Tensor, by: Scalar) -> Tensor:
    return torch.cos(acc * by)


@epigemm.epilogue
def tangent(acc: Tensor, by: Scalar) -> Tensor:
    return torch.tan(acc * by)


@epigemm.epilogue
def cardinal(acc: Tensor, by: Scalar) -> Tensor:
    return torch.sinc(acc * by)


@epigemm.epilogue
def rest(acc: Tensor, by: Scalar) -> Tensor:
    return torch.fmod(acc * by, STEP)


@epigemm.epilogue
def wrapped(acc: Tensor, by: Scalar) -> Tensor:
    return torch.remainder(acc * by, -STEP)


@epigemm.epilogue
def counted(acc: Tensor, by: Scalar) -> Tensor:
    return torch.div(acc * by, STEP, rounding_mode="floor")


@epigemm.epilogue
def every_kind(acc: Tensor, bias: PerColumn, row: PerRow, other: Matrix, more: Matrix, by: Scalar) -> Tensor:
    result: Tensor = torch.sin(acc * by) * other + torch.cos(acc * by) * bias * row + more
    return result


@epigemm.epilogue
def pair_of_waves(acc: Tensor, gate: Matrix, by: Scalar) -> Tensor:
    result: Tensor = torch.sin(acc * by) * torch.cos(gate * by)
    return result


def arguments(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Near numbers, but: some far ones alone, far rows and columns, a block of far ones, zeros, an infinity and a NaN.

    An infinity makes its row NaN in a product with the identity.
    """
    generator = torch.Generator(DEVICE).manual_seed(m * n)
    x = torch.randn(m, n, device=DEVICE, generator=generator) * 8
    far = torch.randn(m, n, device=DEVICE, generator=generator).abs() * 5000 + 3400  # 3400 * BY > 1e5
    if dtype == torch.bfloat16:
        far = far * torch.exp2(torch.randint(0, 90, (m, n), device=DEVICE, generator=generator).float())
    far = far.clamp(max=65504.0) if dtype == torch.float16 else far
    is_far = torch.rand(m, n, device=DEVICE, generator=generator) < 1 / 300
    is_far[m // 2] = is_far[:, n // 3] = True
    is_far[: m // 4, : n // 4] = True
    x = torch.where(is_far, far, x)
    if m > 1:
        x[-1, ::2], x[-1, 1::2] = 0.0, -0.0
        x[-9, 5], x[-17, 3] = math.inf, math.nan
    return x.to(dtype)


def check(found: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Against fp64: the rounding, and `SLACK` of the terms."""
    low, high = (
        (expected + way * (SLACK * terms + torch.finfo(torch.float32).tiny)).to(found.dtype).double()
        for way in (-1.0, 1.0)
    )
    wide = found.double()
    right = ((low <= wide) & (wide <= high)) | (wide.isnan() & expected.isnan())
    wrong = (~right).nonzero()
    places = [
        (*place, float(wide[tuple(place)]), float(expected[tuple(place)])) for place in wrong[:4].tolist()
    ]
    assert not len(wrong), f"{len(wrong)} of {right.numel()} are wrong: {places}"


def angles(x: Tensor) -> Tensor:
    """What the functors take a sine of, as fp32 has it; NaN in all of a row with an infinity or a NaN."""
    product = torch.where(x.isfinite().all(1, keepdim=True), x.float(), math.nan)
    return (product * BY).double()


def run_elementwise(function: epigemm.UserEpilogue, x: Tensor) -> Tensor:
    spec = typed(function.traced, [True])
    assert planned.has_gpu_kernels(x)
    assert loader.link(spec, elementwise_kernels.missing(spec, x), x.device) == ""
    out = torch.full_like(x, 7.0)
    call = ElementwiseCall(spec, x, (BY,), out)
    assert resolve_elementwise.elementwise(call) is out
    return out


def run_fused(
    function: epigemm.UserEpilogue, x: Tensor, operands: list[Tensor], family: str, tile: int
) -> Tensor:
    out = torch.full_like(x, 7.0)
    weight = torch.eye(x.shape[1], device=DEVICE, dtype=x.dtype)
    spec = typed(function.traced, [False] * len(operands) + [True])
    plan = plans.numbers(family, tile)
    forced_into(out, spec.name, x, weight, "ieee", operands=operands, scalars=[BY], plan=plan)
    return out


FUNCTIONS = {"sin": sine, "cos": cosine, "tan": tangent, "sinc": cardinal}
FUNCTIONS |= {"fmod": rest, "remainder": wrapped, "floor_div": counted}
SOME = {plans.TMA: 4, plans.SWAP_AB: 0, plans.MMA: 0}


def expected_of(name: str, angle: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64, and the size of the terms. fmod is exact; remainder rounds its sum with the divisor to fp32."""
    if name == "fmod":
        return torch.fmod(angle, STEP), torch.zeros_like(angle)
    if name == "remainder":
        return torch.remainder(angle, -STEP), torch.full_like(angle, 2.0**-9 * STEP)
    if name == "floor_div":
        count = torch.div(angle, STEP, rounding_mode="floor")
        return count, torch.where(angle.abs() > 2.0**20 * STEP, count.abs(), 0.0)
    if name != "sinc":
        exact: Tensor = getattr(torch, name)(angle)
        return exact, exact.abs() + (1.0 if name != "tan" else 2.0**-10 * (1 + exact * exact))
    inner = (angle.float() * torch.tensor(math.pi, device=DEVICE)).double()
    return torch.where(angle == 0, 1.0, torch.sin(inner) / inner), 1 / inner.abs().clamp(min=1.0)


@types
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("where", ["elementwise", *SOME])
def test_functions(name: str, where: str, dtype: torch.dtype) -> None:
    for m, n in ((264, 272), (1, 128), (77, 136)):
        x = arguments(m, n, dtype)
        if where == "elementwise":
            found = run_elementwise(FUNCTIONS[name], x)
            angle = (x.float() * BY).double()
        else:
            found, angle = run_fused(FUNCTIONS[name], x, [], where, SOME[where]), angles(x)
        expected, terms = expected_of(name, angle)
        check(found, expected, terms)


def test_rows_that_are_not_whole_vectors() -> None:
    """The elementwise kernel computes them one element at a time."""
    x = arguments(70, 131, torch.bfloat16)
    check(run_elementwise(sine, x), *expected_of("sin", (x.float() * BY).double()))


@types
@pytest.mark.parametrize(("family", "tile"), TILES)
def test_every_tile(family: str, tile: int, dtype: torch.dtype) -> None:
    """Elements that are computed again get their own operands."""
    for m, n in ((300, 520), (33, 72)):
        x = arguments(m, n, dtype)
        bias, row = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((n,), (m, 1)))
        other = torch.randn(m, n, device=DEVICE).to(dtype)
        more = torch.randn(m, n + 1, device=DEVICE).to(dtype)[:, 1:]
        found = run_fused(every_kind, x, [bias, row, other, more], family, tile)
        angle = angles(x)
        first = torch.sin(angle) * other.double()
        second = torch.cos(angle) * bias.double() * row.double()
        terms = other.double().abs() + (bias.double() * row.double()).abs() + more.double().abs()
        check(found, first + second + more.double(), terms)


@types
def test_the_bits_of_near_elements_do_not_depend_on_far_ones(dtype: torch.dtype) -> None:
    x = (torch.randn(256, 256, device=DEVICE) * 8).to(dtype)
    spoiled = x.clone()
    spoiled[::7, ::5] = 60000.0
    stays = spoiled == x
    for family, tile in SOME.items():
        assert torch.equal(
            run_fused(sine, x, [], family, tile)[stays], run_fused(sine, spoiled, [], family, tile)[stays]
        )


@types
@pytest.mark.parametrize("tile", PAIR_TILES)
def test_pairs_of_products(tile: int, dtype: torch.dtype) -> None:
    m, n = 200, 264
    x = arguments(m, n, dtype)
    weight = torch.eye(n, device=DEVICE, dtype=dtype)
    flipped = weight.flip(0).contiguous()
    out = torch.full_like(x, 7.0)
    name = typed(pair_of_waves.traced, [False, True]).name
    plan = plans.numbers(plans.TMA, tile)
    forced_into(out, name, x, weight, "ieee", scalars=[BY], plan=plan, weight2=flipped)
    angle = angles(x)
    expected = torch.sin(angle) * torch.cos(angle.flip(1))
    check(out, expected, torch.ones_like(expected))
