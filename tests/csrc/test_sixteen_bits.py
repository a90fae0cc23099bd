"""Results of 16 bits as kernels make them, short functions and all, under g++: every number of fp16 and of bf16.

The code is that of the kernels. Where a GPU has one inexact instruction, the host's result is disturbed by that
instruction's error, in both directions, as in `test_short_forms`.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import SLOTS
from epigemm.epilogues.tracer.accuracy import FEW, POWERS, ROUNDED_TO, short_number
from epigemm.epilogues.tracer.source import POWERS as WRITTEN
from epigemm.epilogues.tracer.source import kernel_functions, prelude
from tests.csrc.test_short_forms import ERRORS, EXP2_ERROR, FAR_ERRORS, RECIPROCAL_ERROR, disturbed
from tests.support.functors import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

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


def traced_of(name: str) -> Traced:
    return traced_function(EVERY[name])


def traced_function(written: Function) -> Traced:
    def function(acc: Tensor) -> Tensor:
        return written(acc)

    return trace(function)


def compiled(source: Path) -> ctypes.CDLL:
    """A library of functions of arrays, with `disturb` among them."""
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(source.with_suffix(".so"))], check=True)
    found = ctypes.CDLL(str(source.with_suffix(".so")))
    found.disturb.argtypes = [ctypes.c_float, ctypes.c_float]
    return found


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    return {name: traced_of(name) for name in EVERY}


@pytest.fixture(scope="module")
def library(traced: dict[str, Traced], tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`NAME_DTYPE(x, y, n)` of every function, as a kernel of that type calls it."""
    lines = [f"#include <{name}>" for name in ("cmath", "cstddef", "cstdint", "cstring", "initializer_list")]
    lines += ["#define __device__", "static float exp2_factor = 1.0f, reciprocal_factor = 1.0f;"]
    lines += [
        disturbed(prelude()),
        'extern "C" void disturb(float a, float b) { exp2_factor = a, reciprocal_factor = b; }',
    ]
    given = ", ".join(["x[i]", *["0.0f"] * len(SLOTS)])
    for (name, one), dtype in itertools.product(traced.items(), ROUNDED_TO):
        text = kernel_functions(one.program, (), (), (f"apply_{dtype}",)).replace('extern "C"', "static")
        lines += [f"namespace of_{name}_{dtype} {{", one.source, text, "}"]
        lines.append(f'extern "C" void {name}_{dtype}(const float* x, float* y, long n) {{')
        lines.append(f"  for (long i = 0; i < n; ++i) y[i] = of_{name}_{dtype}::epigemm_apply({given});\n}}")
    source = tmp_path_factory.mktemp("sixteen_bits") / "kernels.cpp"
    source.write_text("\n".join(lines))
    return compiled(source)


def half_unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What a rounding to `dtype` is off by at most."""
    numbers = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=numbers.tiny))[1] - 1
    return torch.ldexp(torch.full_like(exact, 0.5 * numbers.eps), exponent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_every_number(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    """No result is off by more than its rounding, 2^-15 of itself and, of a sum, what fp32 loses of the terms.

    Of bf16's own forms, by what these are off.
    """
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().contiguous()
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
    out = torch.empty_like(x)
    for signs in itertools.product((-1.0, 1.0), repeat=2):
        library.disturb(1.0 + signs[0] * EXP2_ERROR, 1.0 + signs[1] * RECIPROCAL_ERROR)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out)]
        getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")(*pointers, ctypes.c_long(x.numel()))
        found = out.to(dtype).double()
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
    assert POWERS.keys() == WRITTEN.keys()


@pytest.mark.parametrize(("factors", "is_short"), [(16, True), (17, False)])
def test_products_of_many_are_accurate(factors: int, is_short: bool) -> None:
    def product(acc: Tensor) -> Tensor:
        result = torch.tanh(acc)
        for number in range(1, factors):
            result = result * torch.tanh(acc * (1.0 / (1 + number)))
        return result

    assert (short_number(trace(product).program, ROUNDED_TO["float16"]) is not None) == is_short


UNITS_LAST: dict[str, tuple[str, Function, float, float]] = {
    # name: the C++ functor's text of z and s, fp64, the worst units of bf16 and of fp16 that a result is off by
    "tanh": ("math::tanh(z)", torch.tanh, 0.63, 0.52),
    "sigmoid": ("math::sigmoid(z)", torch.sigmoid, 0.501, 0.501),
    "silu": ("z * math::sigmoid(z)", lambda x: x * torch.sigmoid(x), 0.501, 0.501),
    "gelu": ("math::gelu(z)", EXACT["gelu"], 0.60, 0.52),
    "gelu_tanh": ("math::gelu_tanh(z)", EXACT["gelu_tanh"], 0.51, 0.52),
    "sigmoid_residual": ("z + T(2) * math::sigmoid(z)", lambda x: x + 2 * torch.sigmoid(x), 0.501, 0.51),
}
"""Of numbers from -6 on, where results are normal numbers (of fp16 too)."""


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`NAME_DTYPE(x, y, n)` of the formulas of built-in functors."""
    lines = [f"#include <{name}>" for name in ("cmath", "cstddef", "cstdint", "cstring", "initializer_list")]
    lines += ["static float exp2_factor = 1.0f, reciprocal_factor = 1.0f;", disturbed(prelude())]
    lines += ['extern "C" void disturb(float a, float b) { exp2_factor = a, reciprocal_factor = b; }']
    lines += ["namespace epigemm {"]
    for name, (text, *_) in UNITS_LAST.items():
        lines.append(f"template <class T> T of_{name}(T z) {{ return {text}; }}")
        for dtype, number in (("float16", "Rounded"), ("bfloat16", "RoundedToBFloat16")):
            lines.append(f'extern "C" void {name}_{dtype}(const float* x, float* y, long n) {{')
            lines.append(f"  for (long i = 0; i < n; ++i) y[i] = of_{name}({number}(x[i])).value;\n}}")
    source = tmp_path_factory.mktemp("built_in") / "formulas.cpp"
    source.write_text("\n".join([*lines, "}"]))
    return compiled(source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNITS_LAST)
def test_units_in_the_last_place(built_in: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    """What docs/epilogues.md says of every number of 16 bits: .5 of a unit is the rounding itself."""
    _, function, of_bfloat16, of_float16 = UNITS_LAST[name]
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().contiguous()
    exact = function(x.double())
    unit = 2.0 * half_unit(exact, dtype)
    numbers = torch.finfo(dtype)
    seen = exact.isfinite() & (exact.abs() >= numbers.tiny) & (exact.abs() <= numbers.max)
    if name.startswith("gelu"):
        seen &= x >= -6
    if name == "silu":  # a sigmoid below all subnormal numbers is 0
        seen &= x >= -87
    if name == "sigmoid_residual":  # where the terms cancel, fp32 loses some of a result's digits
        seen &= exact.abs() >= 2.0**-4
    out = torch.empty_like(x)
    worst = 0.0
    for signs in itertools.product((-1.0, 1.0), repeat=2):
        built_in.disturb(1.0 + signs[0] * EXP2_ERROR, 1.0 + signs[1] * RECIPROCAL_ERROR)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out)]
        run = getattr(built_in, f"{name}_{str(dtype).removeprefix('torch.')}")
        run(*pointers, ctypes.c_long(x.numel()))
        off = ((out.to(dtype).double() - exact).abs() / unit)[seen].max()
        worst = max(worst, float(off))
    assert worst <= (of_bfloat16 if dtype == torch.bfloat16 else of_float16)


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

CHUNKS = """
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
extern "C" void NAME_single(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = of_NAME::epigemm_apply(GIVEN);
}
"""


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Of each of `NEAR`, results by chunks, as kernels compute them, and one by one."""
    lines = [f"#include <{name}>" for name in ("cmath", "cstddef", "cstdint", "cstring", "initializer_list")]
    lines += ["#define __device__", prelude(), 'extern "C" void disturb(float, float) {}']
    given = ", ".join(["x[i]", *["0.0f"] * len(SLOTS)])
    for (name, function), dtype in itertools.product(NEAR.items(), ROUNDED_TO):
        one = traced_function(function)
        text = kernel_functions(one.program, (), (), (f"apply_{dtype}",)).replace('extern "C"', "static")
        lines += [f"namespace of_{name}_{dtype} {{", one.source, text, "}"]
        chunks = CHUNKS.replace("NAME", f"{name}_{dtype}").replace("CHUNK", str(CHUNK))
        lines.append(chunks.replace("GIVEN", given))
    source = tmp_path_factory.mktemp("chunks") / "chunks.cpp"
    source.write_text("\n".join(lines))
    return compiled(source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NEAR)
def test_results_by_chunks(chunked: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    """Chunks of near numbers, of far ones, and of both, with zeros, infinities and NaN: the bits are the same."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    lone = torch.linspace(-3, 3, 64 * CHUNK)
    lone[5 :: 2 * CHUNK] = torch.logspace(3, 38, 32) if dtype == torch.bfloat16 else 65504.0
    shuffled = every[torch.randperm(every.numel(), generator=torch.Generator().manual_seed(0))]
    x = torch.cat([every, lone, shuffled]).contiguous()
    by_chunks, single = torch.empty_like(x), torch.empty_like(x)
    function = f"{name}_{str(dtype).removeprefix('torch.')}"
    pointers = [[ctypes.c_void_p(each.data_ptr()) for each in (x, out)] for out in (by_chunks, single)]
    again = getattr(chunked, f"{function}_chunks")(*pointers[0], ctypes.c_long(x.numel()))
    getattr(chunked, f"{function}_single")(*pointers[1], ctypes.c_long(x.numel()))
    same = (by_chunks.view(torch.int32) == single.view(torch.int32)) | (by_chunks.isnan() & single.isnan())
    assert same.all(), x[~same][:8]
    assert 0 < again < x.numel() // CHUNK if name != "gelu" else again == 0
