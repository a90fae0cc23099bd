"""Results of 16 bits as kernels make them, short functions and all, under g++: every number of fp16 and of bf16.

The text is that of a kernel. What is one instruction on a GPU is disturbed by as much as that is off, in both
directions, as in `test_short_forms`.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaring import Traced, trace
from epigemm.epilogues.kinds import SLOTS
from epigemm.epilogues.tracing.short import FEW, POWERS, may_be_short
from epigemm.epilogues.tracing.source import POWERS as WRITTEN
from epigemm.epilogues.tracing.source import kernel_functions, prelude
from tests.csrc.test_short_forms import EXP2_ERROR, RECIPROCAL_ERROR, disturbed
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
    "logaddexp": (lambda x: torch.logaddexp(x, -0.5 * x), lambda x: 1 + x.abs()),
}
# Sums behind functions that are off by a few units alone: they stay short.
SUMS: dict[str, tuple[Function, Function]] = {
    "sigmoid_residual": (lambda x: x + 2.0 * torch.sigmoid(x), torch.abs),
    "silu_residual": (lambda x: F.silu(x) - x, torch.abs),
    "one_minus_sigmoid": (lambda x: 1 - torch.sigmoid(x), torch.ones_like),
    "quotient_and_one": (lambda x: x / 3.0 + 1.0, lambda x: 1 + x.abs()),
    "snake": (lambda x: x + torch.sin(x) ** 2, lambda x: 1 + x.abs()),
    "softplus_by_hand": (lambda x: torch.log(1 + torch.exp(x)), torch.ones_like),
}
TERMS = {**ACCURATE, **SUMS}
EVERY = {**SHORT, **{name: function for name, (function, _) in TERMS.items()}}
RELATIVE, FAR_LEFT = 2.0**-15, 2.0**-40  # what docs/epilogues.md says of short functions
UNIT = 2.0**-24
DTYPES = [torch.float16, torch.bfloat16]


def traced_of(name: str) -> Traced:
    written = EVERY[name]

    def function(acc: Tensor) -> Tensor:
        return written(acc)

    return trace(function)


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    return {name: traced_of(name) for name in EVERY}


@pytest.fixture(scope="module")
def library(traced: dict[str, Traced], tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`NAME_kernel(x, y, n)` of every function, as a kernel of a 16-bit type calls it."""
    lines = [f"#include <{name}>" for name in ("cmath", "cstddef", "cstdint", "cstring", "initializer_list")]
    lines += ["#define __device__", "static float exp2_factor = 1.0f, reciprocal_factor = 1.0f;"]
    lines += [
        disturbed(prelude()),
        'extern "C" void disturb(float a, float b) { exp2_factor = a, reciprocal_factor = b; }',
    ]
    given = ", ".join(["x[i]", *["0.0f"] * len(SLOTS)])
    for name, one in traced.items():
        text = kernel_functions(one.program, (), (), ("apply_16",)).replace('extern "C"', "static")
        lines += [f"namespace of_{name} {{", one.source, text, "}"]
        lines.append(f'extern "C" void {name}_kernel(const float* x, float* y, long n) {{')
        lines.append(f"  for (long i = 0; i < n; ++i) y[i] = of_{name}::epigemm_apply({given});\n}}")
    source = tmp_path_factory.mktemp("sixteen_bits") / "kernels.cpp"
    source.write_text("\n".join(lines))
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(source.with_suffix(".so"))], check=True)
    found = ctypes.CDLL(str(source.with_suffix(".so")))
    found.disturb.argtypes = [ctypes.c_float, ctypes.c_float]
    return found


def half_unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What a rounding to `dtype` is off by at most."""
    numbers = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=numbers.tiny))[1] - 1
    return torch.ldexp(torch.full_like(exact, 0.5 * numbers.eps), exponent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_every_number(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    """No result is off by more than its rounding, 2^-15 of itself and, of a sum, what fp32 loses of the terms."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().contiguous()
    exact = EXACT.get(name, EVERY[name])(x.double())
    units = 4 if name in ACCURATE else FEW
    terms = units * UNIT * TERMS[name][1](x.double()) if name in TERMS else torch.zeros_like(exact)
    # Subnormal results of fp32 are 0 on a GPU, whatever they are multiplied with.
    tiny = torch.finfo(torch.float32).tiny * (1 + x.double().abs())
    bound = half_unit(exact, dtype) + RELATIVE * exact.abs() + terms + tiny
    if "gelu" in name:
        bound = bound + torch.where(x < -6, FAR_LEFT, 0.0)
    # Parts of a formula may overflow in fp32 where the whole does not, in PyTorch as well.
    seen = x.abs() <= 80.0 if name in TERMS else exact.abs() <= torch.finfo(dtype).max / 8
    seen |= x.isnan()
    out = torch.empty_like(x)
    for signs in itertools.product((-1.0, 1.0), repeat=2):
        library.disturb(1.0 + signs[0] * EXP2_ERROR, 1.0 + signs[1] * RECIPROCAL_ERROR)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out)]
        getattr(library, f"{name}_kernel")(*pointers, ctypes.c_long(x.numel()))
        found = out.to(dtype).double()
        same = (found == exact.to(dtype).double()) | (found.isnan() & exact.isnan())
        wrong = seen & ~same & ~((found - exact).abs() <= bound)
        assert not wrong.any(), [
            (float(x[place]), float(found[place]), float(exact[place]))
            for place in wrong.nonzero().flatten().tolist()[:5]
        ]


def test_what_is_short(traced: dict[str, Traced]) -> None:
    """Functions of PyTorch and what keeps their errors are, sums that may cancel behind tanh and the like are not."""
    short = {name for name, one in traced.items() if may_be_short(one.program)}
    assert short == {*SHORT, *SUMS}
    assert POWERS.keys() == WRITTEN.keys()


@pytest.mark.parametrize(("factors", "is_short"), [(16, True), (17, False)])
def test_products_of_many_are_accurate(factors: int, is_short: bool) -> None:
    def product(acc: Tensor) -> Tensor:
        result = torch.tanh(acc)
        for number in range(1, factors):
            result = result * torch.tanh(acc * (1.0 / (1 + number)))
        return result

    assert may_be_short(trace(product).program) == is_short
