"""Results of 16 bits as kernels make them, short functions and all, under g++: every number of fp16 and of bf16.

The code is that of the kernels. Where a GPU has one inexact instruction, the host's result is disturbed by that
instruction's error, in both directions, as in `test_short_forms`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import SLOTS
from epigemm.epilogues.tracer.accuracy import FEW, ROUNDED_TO, short_number
from epigemm.epilogues.tracer.source import kernel_functions, prelude
from tests.csrc.test_short_forms import ERRORS, EXP2_ERROR, FAR_ERRORS, RECIPROCAL_ERROR, disturbed
from tests.support.functors import compiled, needs_compiler

pytestmark = needs_compiler

Function = Callable[[Tensor], Tensor]


def cdf_of_normal(x: Tensor) -> Tensor:
    """Without the subtraction of 1 + erf."""
    return 0.5 * torch.erfc(-x * 0.5**0.5)


EXACT: dict[str, Function] = {
    "gelu": lambda x: x * cdf_of_normal(x),
    "gelu_scaled": lambda x: x * cdf_of_normal(x) * 0.3 / 7.0,
    "gelu_rest": lambda x: x * cdf_of_normal(-x),
    "gelu_tanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}
"""Where torch's formula subtracts, in fp64 as well."""
SHORT: dict[str, Function] = {
    "celu": lambda x: F.celu(x, 0.7),
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_scaled": lambda x: F.gelu(x) * 0.3 / 7.0,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": F.relu,
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "threshold": lambda x: F.threshold(x, 0.5, -7.0),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "asinh", "acosh", "atanh", "erfc")},
    **{name: getattr(torch, name) for name in ("erfinv", "i0")},
    "fmod": lambda x: torch.fmod(x, 0.375),
    "remainder": lambda x: torch.remainder(x, -1.75),
    "floor_div": lambda x: torch.div(x, 0.3125, rounding_mode="floor"),
    "pow": lambda x: torch.pow(x, 1.7),
    "pow_of_whole": lambda x: torch.pow(x, -5.0),
    "pow_of_number": lambda x: torch.pow(1.3, x),
    "hypot": lambda x: torch.hypot(x, 0.3 * x),
    "atan2": lambda x: torch.atan2(x, -0.7 * x),
}
# With the size of the terms, of which fp32 loses some units.
ACCURATE: dict[str, tuple[Function, Function]] = {
    "tanhshrink": (F.tanhshrink, torch.abs),
    "one_minus_tanh": (lambda x: 1 - torch.tanh(x), torch.ones_like),
    "tanh_of_number": (lambda x: 0.25 - torch.tanh(x), torch.ones_like),
    "gelu_rest": (lambda x: x - F.gelu(x), torch.abs),
    "gelu_residual": (lambda x: F.gelu(x) + x, torch.abs),
    "gelu_by_hand": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
        torch.abs,
    ),
    "expm1_rest": (lambda x: torch.expm1(x) - x, lambda x: x.abs() + torch.expm1(x).abs()),
    "log_of_softplus": (lambda x: torch.log(F.softplus(x)), lambda x: 1 + x.abs()),
    "exp_of_gelu": (lambda x: torch.exp(F.gelu(x)), lambda x: (1 + x.abs()) * torch.exp(F.gelu(x))),
    "softshrink_of_tanh": (lambda x: F.softshrink(torch.tanh(x)), torch.ones_like),
}
# Sums behind functions that are off by a few units alone: they stay short.
SUMS: dict[str, tuple[Function, Function]] = {
    "sigmoid_residual": (lambda x: x + 2.0 * torch.sigmoid(x), torch.abs),
    "silu_residual": (lambda x: F.silu(x) - x, torch.abs),
    "one_minus_sigmoid": (lambda x: 1 - torch.sigmoid(x), torch.ones_like),
    "quotient_and_one": (lambda x: x / 3.0 + 1.0, lambda x: 1 + x.abs()),
    "snake": (lambda x: x + torch.sin(x) ** 2, lambda x: 1 + x.abs()),
    "softplus_by_hand": (lambda x: torch.log(1 + torch.exp(x)), torch.ones_like),
    "logaddexp": (lambda x: torch.logaddexp(x, -0.5 * x), torch.abs),
    "logaddexp2": (lambda x: torch.logaddexp2(x, 0.25 * x), torch.abs),
    "logaddexp_and_zero": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), torch.zeros_like),
    # The terms of their reflections: none on the right.
    "lgamma": (torch.lgamma, lambda x: torch.where(x < -2, 1 + torch.lgamma(-x).abs(), 0.0)),
    "digamma": (torch.digamma, lambda x: torch.where(x < 0, torch.digamma(1 - x).abs(), 0.0)),
}
TERMS = {**ACCURATE, **SUMS}
EVERY = {**SHORT, **{name: function for name, (function, _) in TERMS.items()}}
RELATIVE, FAR_LEFT = 2.0**-15, 2.0**-40  # what docs/epilogues.md says of short functions
UNIT = 2.0**-24
DTYPES = [torch.float16, torch.bfloat16]
# Of bf16's own forms, which these are made of.
OF_BFLOAT16 = {
    "tanh": ERRORS["tanh_bfloat16"],
    "mish": ERRORS["tanh_bfloat16"] + ERRORS["log1p_bfloat16"],
    **dict.fromkeys(["celu", "elu", "selu", "expm1"], ERRORS["expm1_bfloat16"]),
    **dict.fromkeys(["log1p", "logsigmoid", "softplus", "logaddexp_and_zero"], ERRORS["log1p_bfloat16"]),
    **dict.fromkeys(["gelu", "gelu_scaled"], ERRORS["gelu_bfloat16"]),
}


def traced_function(written: Function) -> Traced:
    def function(acc: Tensor) -> Tensor:
        return written(acc)

    return trace(function)


def every_number(dtype: torch.dtype) -> Tensor:
    """In fp32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().contiguous()


class Library:
    """Functions of arrays, as kernels of a type call them."""

    def __init__(self, text: str, folder: Path) -> None:
        self._loaded = ctypes.CDLL(str(compiled(text, folder, "-w", "-O1", "-shared", "-fPIC")))
        self._loaded.disturb.argtypes = [ctypes.c_float, ctypes.c_float]

    def __call__(self, name: str, dtype: torch.dtype, x: Tensor) -> tuple[Tensor, int]:
        """The results in fp32, and what the function returns."""
        out = torch.empty_like(x)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out)]
        function = getattr(self._loaded, name.replace("DTYPE", str(dtype).removeprefix("torch.")))
        return out, function(*pointers, ctypes.c_long(x.numel()))

    def disturbed(self, name: str, dtype: torch.dtype, x: Tensor) -> Iterator[Tensor]:
        """With the errors of a GPU's instructions in all directions."""
        for signs in itertools.product((-1.0, 1.0), repeat=2):
            self._loaded.disturb(1.0 + signs[0] * EXP2_ERROR, 1.0 + signs[1] * RECIPROCAL_ERROR)
            yield self(f"{name}_DTYPE", dtype, x)[0].to(dtype).double()
        self._loaded.disturb(1.0, 1.0)


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    return {name: traced_function(function) for name, function in EVERY.items()}


NEAR: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "sinc")},
    "sine_of_thirty": lambda x: torch.sin(30 * x),
    "snake": lambda x: x + torch.sin(x) ** 2,
    "above": lambda x: torch.where(x > 0.5, torch.cos(x), torch.sin(3 * x)),
    "sine_of_sine": lambda x: torch.sin(1e6 * torch.sin(x)),
    "fmod": lambda x: torch.fmod(x, 0.0037),
    "fmod_of_number": lambda x: torch.fmod(torch.full_like(x, 3.0), x),
    "remainder": lambda x: torch.remainder(x, -0.0017),
    "floor_div": lambda x: torch.div(x, 0.003, rounding_mode="floor"),
    "wrapped": lambda x: torch.sin(torch.remainder(x, 0.0625)) + torch.div(x, 0.25, rounding_mode="floor"),
    "gelu": F.gelu,
}
CHUNK = 16

SINGLE = """
extern "C" void NAME(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = of_NAME::epigemm_apply(GIVEN);
}
"""
CHUNKS = (
    f"""{SINGLE}#define CHUNK {CHUNK}
"""
    + """
extern "C" long NAME_chunks(const float* x, float* y, long n) {
  using namespace of_NAME;
  long again = 0;
  for (long first = 0; first < n; first += CHUNK) {
    bool is_far = false;
    for (long i = first; i < first + CHUNK; ++i) y[i] = epigemm_apply_near(GIVEN, is_far);
    if (!epigemm_has_far() || !is_far) continue;
    ++again;
    for (long i = first; i < first + CHUNK; ++i) y[i] = epigemm_apply(GIVEN);
  }
  return again;
}
"""
)


@pytest.fixture(scope="module")
def library(traced: dict[str, Traced], tmp_path_factory: pytest.TempPathFactory) -> Library:
    """`NAME_DTYPE(x, y, n)` of every function; of those of `NEAR` also by chunks, and without them."""
    lines = [f"#include <{name}>" for name in ("cmath", "cstddef", "cstdint", "cstring", "initializer_list")]
    lines += [
        "#define __device__",
        "#define __noinline__",
        "static float exp2_factor = 1.0f, reciprocal_factor = 1.0f;",
    ]
    lines += [
        disturbed(prelude("open/functor.h")).replace('extern "C"', "static"),
        'extern "C" void disturb(float a, float b) { exp2_factor = a, reciprocal_factor = b; }',
    ]
    near = {f"near_{name}": (traced_function(function), CHUNKS) for name, function in NEAR.items()}
    every = {name: (one, SINGLE) for name, one in traced.items()} | near
    given = ", ".join(["x[i]", *["0.0f"] * len(SLOTS)])
    for (name, (one, loops)), dtype in itertools.product(every.items(), ROUNDED_TO):
        text = kernel_functions(one.program, (), (), (f"apply_{dtype}",))
        lines += [f"namespace of_{name}_{dtype} {{", one.source, text, "}"]
        lines.append(loops.replace("NAME", f"{name}_{dtype}").replace("GIVEN", given))
    return Library("\n".join(lines), tmp_path_factory.mktemp("sixteen_bits"))


def half_unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What a rounding to `dtype` is off by at most."""
    numbers = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=numbers.tiny))[1] - 1
    return torch.ldexp(torch.full_like(exact, 0.5 * numbers.eps), exponent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_every_number(library: Library, name: str, dtype: torch.dtype) -> None:
    """No result is off by more than its rounding, 2^-15 of itself and, of a sum, what fp32 loses of the terms.

    Of bf16's own forms, by what these are off.
    """
    x = every_number(dtype)
    exact = EXACT.get(name, EVERY[name])(x.double())
    units = 4 if name in ACCURATE else FEW
    terms = units * UNIT * TERMS[name][1](x.double()) if name in TERMS else torch.zeros_like(exact)
    # Subnormal results of fp32 are 0 on a GPU, whatever they are multiplied with.
    tiny = torch.finfo(torch.float32).tiny * (1 + x.double().abs())
    relative = max(RELATIVE, OF_BFLOAT16.get(name, 0.0) if dtype == torch.bfloat16 else 0.0)
    bound = half_unit(exact, dtype) + relative * exact.abs() + terms + tiny
    if "gelu" in name:
        is_bfloat16 = dtype == torch.bfloat16 and name in OF_BFLOAT16
        bound = bound + torch.where(x < -6, FAR_ERRORS["gelu_bfloat16"] if is_bfloat16 else FAR_LEFT, 0.0)
    # Parts of a formula may overflow in fp32 where the whole does not, in PyTorch as well.
    seen = x.abs() <= 80.0 if name in TERMS else exact.abs() <= torch.finfo(dtype).max / 8
    seen |= x.isnan()
    for found in library.disturbed(name, dtype, x):
        same = (found == exact.to(dtype).double()) | (found.isnan() & exact.isnan())
        wrong = seen & ~same & ~((found - exact).abs() <= bound)
        assert not wrong.any(), [
            (float(x[place]), float(found[place]), float(exact[place]))
            for place in wrong.nonzero().flatten().tolist()[:5]
        ]


def test_what_is_short(traced: dict[str, Traced]) -> None:
    """Functions of PyTorch and what keeps their errors are, sums that may cancel behind tanh and the like are not."""
    for dtype, rounded_to in ROUNDED_TO.items():
        numbers = {name: short_number(one.program, rounded_to) for name, one in traced.items()}
        assert {name for name, number in numbers.items() if number} == {*SHORT, *SUMS}
        own = {"Rounded"} if dtype == "float16" else {"RoundedToBFloat16"}
        assert {*numbers.values()} - {None} == own


@pytest.mark.parametrize(("factors", "is_short"), [(16, True), (17, False)])
def test_products_of_many_are_accurate(factors: int, is_short: bool) -> None:
    def product(acc: Tensor) -> Tensor:
        result = torch.tanh(acc)
        for number in range(1, factors):
            result = result * torch.tanh(acc * (1.0 / (1 + number)))
        return result

    assert (short_number(trace(product).program, ROUNDED_TO["float16"]) is not None) == is_short


UNITS_LAST = {
    "tanh": (0.63, 0.52),
    "sigmoid": (0.501, 0.501),
    "silu": (0.501, 0.501),
    "gelu": (0.60, 0.52),
    "gelu_tanh": (0.51, 0.52),
    "sigmoid_residual": (0.501, 0.51),
}
"""The worst units of bf16 and of fp16 that a result is off by,
of numbers from -6 on, where results are normal numbers (of fp16 too)."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNITS_LAST)
def test_units_in_the_last_place(library: Library, name: str, dtype: torch.dtype) -> None:
    """What docs/epilogues.md says of every number of 16 bits: .5 of a unit is the rounding itself."""
    of_bfloat16, of_float16 = UNITS_LAST[name]
    x = every_number(dtype)
    exact = EXACT.get(name, EVERY[name])(x.double())
    unit = 2.0 * half_unit(exact, dtype)
    numbers = torch.finfo(dtype)
    seen = exact.isfinite() & (exact.abs() >= numbers.tiny) & (exact.abs() <= numbers.max)
    if name.startswith("gelu"):
        seen &= x >= -6
    if name == "silu":  # a sigmoid below all subnormal numbers is 0
        seen &= x >= -87
    if name == "sigmoid_residual":  # where the terms cancel, fp32 loses some of a result's digits
        seen &= exact.abs() >= 2.0**-4
    found = torch.stack([*library.disturbed(name, dtype, x)])
    worst = float(((found - exact).abs() / unit)[:, seen].max())
    assert worst <= (of_bfloat16 if dtype == torch.bfloat16 else of_float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NEAR)
def test_results_by_chunks(library: Library, name: str, dtype: torch.dtype) -> None:
    """Chunks of near numbers, of far ones, and of both, with zeros, infinities and NaN: the bits are the same."""
    every = every_number(dtype)
    lone = torch.linspace(-3, 3, 64 * CHUNK)
    lone[5 :: 2 * CHUNK] = torch.logspace(3, 38, 32) if dtype == torch.bfloat16 else 65504.0
    shuffled = every[torch.randperm(every.numel(), generator=torch.Generator().manual_seed(0))]
    x = torch.cat([every, lone, shuffled]).contiguous()
    by_chunks, again = library(f"near_{name}_DTYPE_chunks", dtype, x)
    single, _ = library(f"near_{name}_DTYPE", dtype, x)
    same = (by_chunks.view(torch.int32) == single.view(torch.int32)) | (by_chunks.isnan() & single.isnan())
    assert same.all(), x[~same][:8]
    assert 0 < again < x.numel() // CHUNK if name != "gelu" else again == 0
