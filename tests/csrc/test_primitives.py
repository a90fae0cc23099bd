"""Every primitive against torch on the CPU, at special and random points: values in fp32 and fp64, derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.custom import Traced, trace
from epigemm.operand_kinds import PerColumn
from tests.support.functors import COMPILER, Functors

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

INF, NAN = float("inf"), float("nan")
SPECIAL = [
    *(
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        3.0,
        -3.0,
        6.0,
        20.0,
        20.5,
        -20.0,
        88.5,
        89.5,
        -89.5,
        -104.0,
    ),
    *(
        0.25,
        0.95,
        -0.95,
        9.99,
        10.0,
        -0.3,
        1e-6,
        -1e-6,
        1e-30,
        3e-39,
        -3e-39,
        700.5,
        -745.0,
        1e4,
        -1e4,
        65519.0,
    ),
    *(65520.0, 6e-5, 6e-8, 1e30, -1e30, 3.4e38, INF, -INF, NAN),
]
# Functions of one argument: name -> how many units in the last place the library and torch may differ by.
UNARY: dict[str, float] = {
    **dict.fromkeys(
        ["neg", "abs", "sign", "relu", "round", "trunc", "floor", "ceil", "reciprocal", "detach"], 0.0
    ),
    **dict.fromkeys(
        [
            "sigmoid",
            "tanh",
            "exp",
            "exp2",
            "expm1",
            "sqrt",
            "log",
            "log2",
            "log10",
            "log1p",
            "rsqrt",
            "sin",
            "cos",
            "tan",
            "asin",
        ],
        4.0,
    ),
    **dict.fromkeys(["acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc"], 4.0),
    **dict.fromkeys(["erfinv", "lgamma", "digamma", "i0", "sinc"], 8.0),
}
BINARY: dict[str, float] = {
    **dict.fromkeys(
        [
            "add",
            "sub",
            "mul",
            "div",
            "maximum",
            "minimum",
            "fmin",
            "fmax",
            "fmod",
            "remainder",
            "copysign",
            "floor_divide",
        ],
        0.0,
    ),
    **dict.fromkeys(["pow", "atan2", "hypot", "xlogy", "logaddexp", "logaddexp2"], 4.0),
}
PREDICATES = {"isnan": 1, "isinf": 1, "isfinite": 1, "signbit": 1, "logical_not": 1} | dict.fromkeys(
    ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"], 2
)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (F.gelu, 4.0),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), 4.0),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), 0.0),
    "elu": (lambda x: F.elu(x, 1.5), 4.0),
    "selu": (F.selu, 4.0),
    "celu": (lambda x: F.celu(x, 2.0), 4.0),
    "silu": (F.silu, 4.0),
    "mish": (F.mish, 6.0),
    "softplus": (lambda x: F.softplus(x, 2.0, 5.0), 4.0),
    "softsign": (F.softsign, 1.0),
    "logsigmoid": (F.logsigmoid, 4.0),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 2.5), 0.0),
    "relu6": (F.relu6, 0.0),
    "hardsigmoid": (F.hardsigmoid, 1.0),
    "hardswish": (F.hardswish, 2.0),
    "hardshrink": (F.hardshrink, 0.0),
    "softshrink": (F.softshrink, 0.0),
    "tanhshrink": (F.tanhshrink, 4.0),
    "threshold": (lambda x: F.threshold(x, 0.5, -7.0), 0.0),
    "dropout_in_eval": (lambda x: F.dropout(x, 0.5, training=False), 0.0),
    "clamp": (lambda x: torch.clamp(x, -1.0, 2.5), 0.0),
    "clamp_min": (lambda x: torch.clamp(x, min=0.5), 0.0),
    "clamp_max": (lambda x: torch.clamp(x, max=0.5), 0.0),
    "clamp_reversed": (lambda x: torch.clamp(x, 2.0, -2.0), 0.0),
    "clamp_nan": (lambda x: torch.clamp(x, min=NAN), 0.0),
    "nan_to_num": (torch.nan_to_num, 0.0),
    "nan_to_num_told": (lambda x: torch.nan_to_num(x, 0.5, 1.0, -2.0), 0.0),
    "square": (torch.square, 0.0),
    "cube": (lambda x: x**3, 1.0),
    "power_half": (lambda x: x**0.5, 1.0),
    "power_minus_one": (lambda x: x**-1.0, 0.0),
    "power_minus_two": (lambda x: x**-2.0, 2.0),
    "power_of_two": (lambda x: 2.0**x, 4.0),
    "quotient_of_number": (lambda x: 3.0 / x, 1.0),
    "rsub": (lambda x: 1 - x, 0.0),
    "frac": (torch.frac, 0.0),
    "half": (lambda x: x.half().float(), 0.0),
    "bfloat16": (lambda x: x.bfloat16().float(), 0.0),
    "half_product": (lambda x: (x.half() * 1.7).float(), 0.0),
    "where_integers": (lambda x: torch.where(x > 0, 1, -2) * x, 0.0),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1e9), 0.0),
    "booleans": (lambda x: ((x > 0) & (x < 2) | ~(x > -1) ^ (x == 1)) * x + (x > 0).float(), 0.0),
    "isfinite_of": (lambda x: torch.isfinite(x) * 2.0, 0.0),
    "constant_half": (lambda x: x * 0.1 + torch.full_like(x, 0.3, dtype=torch.half).float(), 1.0),
    "logit": (lambda x: torch.logit(x, 1e-3), 4.0),
    "lerp_number": (lambda x: torch.lerp(x, x * x, 0.75), 2.0),
}
BINARY_MORE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), 1.0),
    "trunc_div": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), 0.0),
    "addcmul": (lambda a, b: torch.addcmul(a, b, a, value=2.0), 1.0),
    "addcdiv": (lambda a, b: torch.addcdiv(a, b, a + 0.5, value=0.5), 1.0),
    "alpha": (lambda a, b: torch.add(a, b, alpha=2.0) - torch.sub(a, b, alpha=0.5), 0.0),
    "clamp_tensor": (lambda a, b: torch.clamp(a, b, b + 1.0), 0.0),
    "where": (lambda a, b: torch.where(a > b, a, b * 2.0), 0.0),
    "gate": (lambda a, b: F.silu(a) * b, 4.0),
}
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
SLOPE_TOLERANCE = {"digamma": 1e-8, "hardsigmoid_": 1e-7, "half_product_": 2.0**-11, "lgamma": 1e-11}
NO_DERIVATIVE_IN_TORCH = {"heaviside", "floor_divide"}


def functions() -> dict[str, tuple[Callable[..., Any], int, float]]:
    """Name -> the function of torch, its arguments, and the units that it may differ by."""
    found: dict[str, tuple[Callable[..., Any], int, float]] = {}
    for name, units in UNARY.items():
        found[name] = (getattr(torch, name), 1, units)
    for name, units in BINARY.items():
        found[name] = (getattr(torch, name), 2, units)
    found["heaviside"] = (torch.heaviside, 2, 0.0)
    for name, count in PREDICATES.items():
        found[name] = (_numbers_of(getattr(torch, name)), count, 0.0)
    for name, (function, units) in ACTIVATIONS.items():
        found[f"{name}_"] = (function, 1, units)
    for name, (binary, units) in BINARY_MORE.items():
        found[f"{name}_"] = (binary, 2, units)
    return found


def _numbers_of(predicate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def numbers(*given: Tensor) -> Tensor:
        return torch.where(predicate(*given), 1.0, 0.0)

    return numbers


FUNCTIONS = functions()


def traced_of(name: str) -> Traced:
    function, arity, _ = FUNCTIONS[name]

    def one(acc: Tensor) -> Tensor:
        result = function(acc)
        assert isinstance(result, Tensor)
        return result

    def two(acc: Tensor, b: PerColumn) -> Tensor:
        result = function(acc, b)
        assert isinstance(result, Tensor)
        return result

    return trace(one if arity == 1 else two)


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    return {name: traced_of(name) for name in FUNCTIONS}


@pytest.fixture(scope="module")
def functors(traced: dict[str, Traced], tmp_path_factory: pytest.TempPathFactory) -> Functors:
    return Functors(traced, tmp_path_factory.mktemp("primitives"))


def points(arity: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Special points, every pair of them for two arguments, and random ones of all sizes."""
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    random = torch.randn(400, generator=generator, dtype=torch.float64)
    random = torch.cat([random, random * 10.0, random * torch.exp(8 * torch.randn(400, generator=generator))])
    if arity == 1:
        return (torch.cat([special, random]).to(dtype),)
    first, second = (axis.reshape(-1) for axis in torch.meshgrid(special, special, indexing="ij"))
    shuffled = random[torch.randperm(len(random), generator=generator)]
    return torch.cat([first, random]).to(dtype), torch.cat([second, shuffled]).to(dtype)


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


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NO_DERIVATIVE_IN_TORCH])
def test_derivatives(functors: Functors, name: str) -> None:
    function, arity, _ = FUNCTIONS[name]
    plain = points(arity, torch.float64)
    seen = ~torch.stack(plain).isnan().any(0)
    if "lerp" in name:
        seen &= torch.stack(plain).isfinite().all(0)  # the way from one end to the other is NaN
    if name == "digamma":
        seen &= ~((plain[0] < 0) & (plain[0] == plain[0].round())) & (
            plain[0] > -1e4
        )  # poles, and angles far out
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
