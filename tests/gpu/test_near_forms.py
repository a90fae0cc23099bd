"""Functors with a near form, in every kernel of 16 bits: no, single and all elements are beyond its range.

The weight is the identity, so the accumulator is x itself, and each element's argument is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import ResultsEpilogue, UserEpilogue
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import elementwise_kernels, resolve
from epigemm.epilogues.registry import typed
from epigemm.linker import loader
from epigemm.planner import plans as planned
from tests.gpu.launching import DEVICE, Kernel, both, every_tile, launch
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, Arithmetic
from tests.support.cases import Operands
from tests.support.formulas import formula
from tests.support.problems import Problem
from tests.support.reference import Bounded, assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

STEP = 0.0390625  # 1e5 is 2.56e6 of these, beyond 2^20
BY = 30.0  # fp16 numbers times this are beyond 1e5, too
SLACK = 2.0**-15
"""Of a result or its terms: 2^-19 of an angle's function, some roundings of fp32, and of tan far away the angle's."""
TYPES = (FP16, BF16)
types = pytest.mark.parametrize("arithmetic", TYPES, ids=lambda each: each.name)


def scaled(parameters: str, value: str) -> UserEpilogue:
    """A function with a number that its arguments are times."""
    made: UserEpilogue = epigemm.epilogue(formula(f"acc, {parameters}by: Scalar -> {value}"))
    return made


FUNCTIONS = {
    "sin": scaled("", "torch.sin(acc * by)"),
    "cos": scaled("", "torch.cos(acc * by)"),
    "tan": scaled("", "torch.tan(acc * by)"),
    "sinc": scaled("", "torch.sinc(acc * by)"),
    "fmod": scaled("", f"torch.fmod(acc * by, {STEP})"),
    "remainder": scaled("", f"torch.remainder(acc * by, -{STEP})"),
    "floor_div": scaled("", f"torch.div(acc * by, {STEP}, rounding_mode='floor')"),
}
every_wave = scaled(
    "bias: PerColumn, row: PerRow, other: Matrix, more: Matrix, ",
    "torch.sin(acc * by) * other + torch.cos(acc * by) * bias * row + more",
)
pair_of_waves = scaled("gate: Matrix, ", "torch.sin(acc * by) * torch.cos(gate * by)")


@epigemm.epilogue
def far_waves(acc: Tensor) -> tuple[Tensor, Tensor]:
    """Two functions with near forms."""
    return torch.sin(acc * BY), torch.cos(acc * BY)


@epigemm.epilogue
def wave_beside(acc: Tensor) -> tuple[Tensor, Tensor]:
    """The stored value has no near form."""
    return torch.sin(acc * BY), acc + 1.0


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
    info = torch.finfo(found.dtype)
    slack = SLACK * terms + torch.finfo(torch.float32).tiny
    floor = info.smallest_normal * (info.eps if found.dtype is torch.float16 else 1)
    assert_within(found, Bounded(expected, slack + info.eps / 2 * (expected.abs() + slack) + floor))


def angles(x: Tensor) -> Tensor:
    """What the functors take a sine of, as fp32 has it; NaN in all of a row with an infinity or a NaN."""
    product = torch.where(x.isfinite().all(1, keepdim=True), x.float(), math.nan)
    return (product * BY).double()


def problem_of(
    function: UserEpilogue | None, x: Tensor, operands: list[Tensor], arithmetic: Arithmetic
) -> Problem:
    """With the identity for a weight."""
    name = typed(function.traced, [False] * len(operands) + [True]).name if function else ""
    weight = torch.eye(x.shape[1], device=DEVICE, dtype=x.dtype)
    return Problem(name, arithmetic, x, weight, Operands(None, operands, [BY]))


def run_elementwise(function: UserEpilogue, x: Tensor) -> Tensor:
    spec = typed(function.traced, [True])
    assert planned.has_gpu_kernels(x)
    assert loader.link(spec, elementwise_kernels.missing(spec, x), x.device) == ""
    out = torch.full_like(x, 7.0)
    assert resolve.elementwise(ElementwiseCall(spec, x, (BY,), out)) is out
    return out


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
def test_functions(name: str, where: str, arithmetic: Arithmetic) -> None:
    """Also where rows are no whole vectors, which the elementwise kernel computes one element at a time."""
    for m, n in ((264, 272), (1, 128), (77, 136), *([(70, 131)] * (where == "elementwise"))):
        x = arguments(m, n, arithmetic.dtype)
        if where == "elementwise":
            found, angle = run_elementwise(FUNCTIONS[name], x), (x.float() * BY).double()
        else:
            problem = problem_of(FUNCTIONS[name], x, [], arithmetic)
            found, angle = launch(problem, plans.numbers(where, SOME[where])), angles(x)
        check(found, *expected_of(name, angle))


class TestEveryTile:
    kernels = tuple(kernel for family in SOME for kernel in every_tile(family, TYPES))

    def test_every_operand(self, kernel: Kernel) -> None:
        """Elements that are computed again get their own operands."""
        for m, n in ((300, 520), (33, 72)):
            x = arguments(m, n, kernel.dtype)
            bias, row = (torch.randn(*shape, device=DEVICE).to(x) for shape in ((n,), (m, 1)))
            other, more = (
                torch.randn(m, n, device=DEVICE).to(x),
                torch.randn(m, n + 1, device=DEVICE).to(x)[:, 1:],
            )
            found = launch(problem_of(every_wave, x, [bias, row, other, more], kernel.arithmetic), kernel)
            angle = angles(x)
            first, by_row = torch.sin(angle) * other.double(), bias.double() * row.double()
            terms = other.double().abs() + by_row.abs() + more.double().abs()
            check(found, first + torch.cos(angle) * by_row + more.double(), terms)

    def test_the_bits_of_near_elements_do_not_depend_on_far_ones(self, kernel: Kernel) -> None:
        x = (torch.randn(256, 256, device=DEVICE) * 8).to(kernel.dtype)
        spoiled = x.clone()
        spoiled[::7, ::5] = 60000.0
        found = [
            launch(problem_of(FUNCTIONS["sin"], each, [], kernel.arithmetic), kernel) for each in (x, spoiled)
        ]
        stays = spoiled == x
        assert torch.equal(found[0][stays], found[1][stays])


class TestSecondValues:
    kernels = tuple(kernel for family in (plans.TMA, plans.SWAP_AB) for kernel in every_tile(family, TYPES))

    @pytest.mark.parametrize(
        ("function", "second"),
        [(far_waves, torch.cos), (wave_beside, lambda angle: angle / BY + 1.0)],
        ids=["both", "one"],
    )
    def test_second_values(
        self, function: ResultsEpilogue, second: Callable[[Tensor], Tensor], kernel: Kernel
    ) -> None:
        """A warp computes far elements again, of either value. A sum keeps the infinity of which a sine is NaN."""
        x = arguments(300, 264, kernel.dtype).nan_to_num(0.0, 0.0, 0.0)
        problem, angle = problem_of(None, x, [], kernel.arithmetic), angles(x)
        problem.operands.scalars = []
        for found, expected in zip(
            both(function, problem, kernel), (torch.sin(angle), second(angle)), strict=True
        ):
            check(found, expected, 1 + expected.abs())


class TestPairs:
    kernels = tuple(
        Kernel(plans.TMA, tile, each)
        for each in TYPES
        for tile in range(plans.tile_count(plans.TMA, "pairs")) or [0]
    )

    def test_pairs_of_products(self, kernel: Kernel) -> None:
        x = arguments(200, 264, kernel.dtype)
        problem = problem_of(None, x, [], kernel.arithmetic)
        problem.name = typed(pair_of_waves.traced, [False, True]).name
        found = launch(problem, kernel, weight2=problem.weight.flip(0).contiguous())
        angle = angles(x)
        expected = torch.sin(angle) * torch.cos(angle.flip(1))
        check(found, expected, torch.ones_like(expected))
