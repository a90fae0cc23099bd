"""Every primitive against torch on the CPU, at special and random points: values in fp32 and fp64, derivatives."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import Scalar
from tests.support.functors import COMPILER, Functors
from tests.support.primitives import FUNCTIONS, NAN, points, traced_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# Sums whose terms may cancel: the size of the terms, of which the roundings are.
TERMS: dict[str, Callable[..., Tensor]] = {
    "lerp_": lambda a, b: a.abs() + b.abs(),
    "addcmul_": lambda a, b: a.abs() + 2 * (a * b).abs(),
    "addcdiv_": lambda a, b: a.abs() + (b / (a + 0.5)).abs(),
    "logaddexp": lambda a, b: a.abs() + b.abs(),
    "logaddexp2": lambda a, b: a.abs() + b.abs(),
    # Torch takes the tangent of a rounded angle: near a pole it is off by the unit over the distance.
    "digamma": lambda x: x.abs().clamp(max=2.0) + (torch.digamma(x) ** 2 if x.dtype == torch.float64 else 0),
    "gelu_": torch.abs,
    "gelu_tanh_": torch.abs,
    "tanhshrink_": torch.abs,
    "lerp_number_": lambda x: x * x,
    "constant_half_": lambda x: 0.1 * x.abs() + 0.3,
}
ONE = torch.ones(())
# The same of derivatives; torch's own has them, too.
SLOPE_TERMS: dict[str, Callable[..., Tensor]] = {
    "tanh": lambda x: ONE,
    "expm1": lambda x: ONE,
    "tanhshrink_": lambda x: ONE,
    "gelu_tanh_": lambda x: 1 + x.abs(),
    "gelu_": lambda x: 1 + x.abs(),
    "mish_": lambda x: 1 + x.abs(),
    "sinc": lambda x: 1 / x.abs(),
    "addcdiv_": lambda a, b: 1 + (b / (a + 0.5) ** 2).abs(),
}
# Where torch's derivative is coarser than fp64: its trigamma is one of fp32, hardsigmoid's 1/6 is an fp32 number, a
# gradient through a cast to fp16 is rounded to it, and lgamma's near a pole takes the tangent of a rounded angle.
SLOPE_TOLERANCE = {
    "float_product_": 1e-7,
    "float_difference_": 1e-7,
    "float_beside_": 1e-7,
    "digamma": 1e-8,
    "hardsigmoid_": 1e-7,
    "half_product_": 2.0**-11,
    "lgamma": 1e-11,
}
NO_DERIVATIVE_IN_TORCH = {"heaviside", "floor_divide"}
# Where a derivative at NaN is another than that of PyTorch's kernels: docs/epilogues.md says so.
OTHER_AT_NAN = {"hardsigmoid_"}


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    return {name: traced_of(name) for name in FUNCTIONS}


@pytest.fixture(scope="module")
def functors(traced: dict[str, Traced], tmp_path_factory: pytest.TempPathFactory) -> Functors:
    return Functors(traced, tmp_path_factory.mktemp("primitives"))


def size_of(name: str, expected: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """What the roundings of a result are relative to."""
    terms = TERMS.get(name)
    return expected.abs() if terms is None else expected.abs() + terms(*inputs)


def assert_close(actual: Tensor, expected: Tensor, bound: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """NaN where NaN is expected, the same infinities, else within the bound."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = ~same & ~(expected.isfinite() & ((actual - expected).abs() <= bound))
    if wrong.any():
        rows = [
            f"{[float(one[place]) for one in inputs]}: {float(actual[place])!r}, expected {float(expected[place])!r}"
            for place in wrong.nonzero().flatten().tolist()[:12]
        ]
        raise AssertionError(f"{int(wrong.sum())} points differ:\n" + "\n".join(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(functors: Functors, name: str, dtype: torch.dtype) -> None:
    function, arity, units = FUNCTIONS[name]
    inputs = points(arity, dtype)
    if name in (
        "fmod",
        "remainder",
    ):  # torch's vectorised fmod gives NaN for subnormal divisors and where a / b overflows
        normal = (inputs[1] == 0) | (inputs[1].abs() >= torch.finfo(dtype).tiny)
        normal &= (inputs[1] == 0) | (inputs[0] / inputs[1]).isfinite() | inputs[0].isinf()
        inputs = inputs[0][normal], inputs[1][normal]
    eps = torch.finfo(dtype).eps
    actual = functors.values(name, *inputs)
    expected = function(*inputs).to(dtype)
    if units:
        # fp64 is the measure; what overflows in fp32 on the way, or rounds a constant to it, does so in torch, too.
        exact = function(*[given.double() for given in inputs]).to(dtype)
        closer = (actual == exact) | ((actual - exact).abs() <= (actual - expected).abs())
        expected = torch.where(closer, exact, expected)
    # Torch flushes some subnormal results; those of a few operations are only good to a subnormal's unit.
    bound = (units * eps * size_of(name, expected, inputs)).clamp(
        min=torch.finfo(dtype).tiny if units else 0.0
    )
    assert_close(actual, expected, bound, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_signs_of_zeros(functors: Functors, traced: dict[str, Traced], name: str, dtype: torch.dtype) -> None:
    """PyTorch's, in this type or the arithmetic's; where its kernels of one and of many elements differ, either."""
    function, arity, _ = FUNCTIONS[name]
    inputs = points(arity, dtype)
    wide = tuple(given if dtype == torch.float64 else given.float() for given in inputs)
    rows = [given.reshape(1, -1) for given in wide]
    by_reference = traced[name].reference(rows[0], *[given[0] for given in rows[1:]])[0]
    expected, of_many = function(*inputs), function(*wide)
    # Not by rounding alone.
    are_zeros = (expected == 0) & (function(*[given.double() for given in inputs]) == 0)
    for actual in (functors.values(name, *wide), by_reference):
        differ = are_zeros & (actual == 0) & (actual.signbit() != expected.signbit())
        for place in differ.nonzero().flatten().tolist():
            single, single_wide = (tuple(one[place : place + 1] for one in given) for given in (inputs, wide))
            signs = [bool(of_many[place].signbit())]
            signs += [bool(function(*given).signbit()) for given in (single, single_wide)]
            assert bool(actual[place].signbit()) in signs, [float(one) for one in single]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NO_DERIVATIVE_IN_TORCH])
def test_derivatives(functors: Functors, name: str) -> None:
    function, arity, _ = FUNCTIONS[name]
    plain = points(arity, torch.float64)
    seen = ~torch.stack(plain).isnan().any(0)
    if "lerp" in name:
        seen &= torch.stack(plain).isfinite().all(0)  # the way from one end to the other is NaN
    if name == "digamma":
        # Poles, and angles far out.
        seen &= ~((plain[0] < 0) & (plain[0] == plain[0].round())) & (plain[0] > -1e4)
    plain = tuple(given[seen] for given in plain)
    inputs = tuple(given.clone().requires_grad_() for given in plain)
    result = function(*inputs)
    gradients: tuple[Tensor | None, ...] = (None,) * arity
    if result.requires_grad:
        gradients = torch.autograd.grad(result.double().sum(), inputs, allow_unused=True)
    for which, gradient in enumerate(gradients):
        expected = torch.zeros_like(plain[0]) if gradient is None else gradient
        size = expected.abs() + (SLOPE_TERMS[name](*plain) if name in SLOPE_TERMS else 0.0)
        bound = SLOPE_TOLERANCE.get(name, 1e-13) * size.clamp(min=1e-290)
        assert_close(functors.slopes(name, which, *plain), expected, bound, plain)


def slope_of(function: Callable[..., Any], x: Tensor) -> float:
    """The derivative at the first of some equal points."""
    leaf = x.clone().requires_grad_()
    result = function(leaf)
    if not result.requires_grad:
        return 0.0
    (found,) = torch.autograd.grad(result.double().sum(), leaf)
    return float(found.flatten()[0])


@pytest.mark.parametrize(
    "name", [n for n, (_, arity, _) in FUNCTIONS.items() if arity == 1 and n not in OTHER_AT_NAN]
)
def test_derivatives_at_nan(functors: Functors, traced: dict[str, Traced], name: str) -> None:
    """Those of PyTorch's kernel of many elements or of that of a single one: they differ for some functions."""
    many = torch.full((1, 64), NAN, dtype=torch.float64)
    slopes = [slope_of(FUNCTIONS[name][0], given) for given in (many, many[0, :1])]
    for actual in (float(functors.slopes(name, 0, many)[0, 0]), slope_of(traced[name].reference, many)):
        bound = SLOPE_TOLERANCE.get(name, 0.0)
        assert any(
            actual == each or abs(actual - each) <= bound or (isnan(actual) and isnan(each))
            for each in slopes
        )


def test_scalars_of_elu() -> None:
    """A number that only a call knows: of a zero the sign, and the slope, from the left."""

    def falling(acc: Tensor, alpha: Scalar) -> Tensor:
        return F.elu(acc, alpha)

    for alpha in (-1.5, 0.75):
        x = torch.tensor([[0.0, -0.0, 1.5, -2.0, NAN]], requires_grad=True)
        found, plain = trace(falling).reference(x, alpha), F.elu(x, alpha)
        torch.testing.assert_close(found, plain, equal_nan=True)
        assert found.signbit()[0, :4].tolist() == plain.signbit()[0, :4].tolist()
        slopes = [torch.autograd.grad(result.sum(), x)[0][0, :4] for result in (found, plain)]
        torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_is_the_function(traced: dict[str, Traced], name: str) -> None:
    """The traced graph gives what the function itself gives, within its roundings."""
    function, arity, units = FUNCTIONS[name]
    inputs = points(arity, torch.float64)
    rows = [given.reshape(1, -1) for given in inputs]
    actual = traced[name].reference(rows[0], *[given[0] for given in rows[1:]])
    expected = function(*inputs).double()
    bound = (max(units, 2.0) * 2.3e-16 * size_of(name, expected, inputs)).clamp(min=1e-300)
    assert_close(actual[0], expected, bound, inputs)
