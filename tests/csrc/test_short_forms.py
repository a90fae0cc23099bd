"""What `Rounded` calls in place of the library, under g++: every form against fp64, over the floats of all sizes.

A GPU's 2^x and 1 / x are one instruction each, off by at most 2 and 1 units in the last place (PTX ISA, ex2.approx.ftz
and rcp.approx.ftz), its logarithm by 2^-22. Here they are disturbed by as much, in both directions: what is left below
the bound then is left on a GPU. It contracts products and sums, which only leaves roundings out.
"""

from __future__ import annotations

import itertools
import math
import subprocess
from pathlib import Path

import pytest

from epigemm.epilogues.tracing.source import prelude
from tests.support.functors import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

RELATIVE = 2.0**-17  # what csrc/epilogue/primitives/short.h says of all of them
FAR_LEFT = 2.0**-40  # and of the GELUs below -6, absolutely
EXP2_ERROR, RECIPROCAL_ERROR = 2.0**-22, 2.0**-23
STRIDE = 251  # of the floats one by one: neighbours differ in their roundings alone
LEAST = 2.0**-126

# name: fp64, and the ends within which the error is relative.
FORMS = {
    "tanh": ("std::tanh(x)", -3e38, 3e38),
    "expm1": ("std::expm1(x)", -3e38, 88.7),
    "gelu": ("0.5 * x * std::erfc(-x * 0.70710678118654752440)", -6.0, 3e38),
    "gelu_tanh": ("x / (1.0 + std::exp(-1.59576912160573071 * (x + 0.044715 * x * x * x)))", -6.0, 3e38),
}
SPECIAL = ["0.0f", "-0.0f", "INFINITY", "-INFINITY", "NAN", "3e38f", "-3e38f"]
INF, NAN = math.inf, math.nan
AT_SPECIAL = {
    "tanh": [0.0, -0.0, 1.0, -1.0, NAN, 1.0, -1.0],
    "expm1": [0.0, -0.0, INF, -1.0, NAN, INF, -1.0],
    "gelu": [0.0, -0.0, INF, NAN, NAN, 3e38, -0.0],
    "gelu_tanh": [0.0, -0.0, INF, NAN, NAN, 3e38, -0.0],
}

PROGRAM = """
float of_bits(std::uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
std::uint32_t bits_of(float x) { std::uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// The worst relative error between two numbers of one sign, or the worst absolute one.
template <class Form, class Exact>
void sweep(Form form, Exact exact, float near, float far, bool is_relative) {
  double worst = 0.0;
  for (std::uint32_t bits = bits_of(near); bits <= bits_of(far); bits += STRIDE) {
    const float x = of_bits(bits);
    const double wanted = exact(double(x));
    const double error = std::fabs(form(x) - wanted) / (is_relative ? std::fabs(wanted) : 1.0);
    if (!(error <= worst)) worst = error == error ? error : INFINITY;
  }
  std::printf("%.9g\\n", worst);
}
"""


def disturbed(text: str) -> str:
    """The headers with an error in 2^x, as large a one in a logarithm, and one in 1 / x, set from outside."""
    for found, put in (
        ("return __builtin_exp2f(x);", "return __builtin_exp2f(x) * exp2_factor;"),
        ("return ::log2f(x);", "return ::log2f(x) + (exp2_factor - 1.0f);"),
        (
            "T reciprocal_normal(T x) {\n  return T(1) / x;",
            "T reciprocal_normal(T x) {\n  return T(1) / x * T(reciprocal_factor);",
        ),
    ):
        assert text.count(found) == 1
        text = text.replace(found, put)
    return text


def program() -> str:
    includes = ["cmath", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "initializer_list"]
    lines = [f"#include <{name}>" for name in includes]
    lines += ["static float exp2_factor = 1.0f, reciprocal_factor = 1.0f;", disturbed(prelude())]
    lines += [PROGRAM.replace("STRIDE", str(STRIDE)), "int main(int count, char** given) {"]
    for name in FORMS:
        lines.append(f"  for (float x : {{{', '.join(SPECIAL)}}})")
        lines.append(f'    std::printf("%g\\n", epigemm::math::short_form::{name}(x));')
    lines += ["  if (count < 3) return 0;"]
    lines += ["  exp2_factor = std::atof(given[1]), reciprocal_factor = std::atof(given[2]);"]
    for name, (exact, low, high) in FORMS.items():
        call = f"  sweep(epigemm::math::short_form::{name}, [](double x) {{ return {exact}; }}, "
        lines += [f"{call}{LEAST}f, {high}f, true);", f"{call}-{LEAST}f, {low}f, true);"]
        lines += [f"{call}{low}f, -3e38f, false);"] if low > -3e38 else []
    return "\n".join([*lines, "}"])


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    source = tmp_path_factory.mktemp("short_forms") / "sweep.cpp"
    source.write_text(program())
    path = source.with_suffix("")
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *options, str(source), "-o", str(path)], check=True)
    return path


def printed(binary: Path, *factors: float) -> list[float]:
    command = [str(binary), *map(repr, factors)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(line) for line in run.stdout.split()]


@pytest.mark.parametrize("signs", [*itertools.product((-1.0, 1.0), repeat=2)], ids=str)
def test_errors(binary: Path, signs: tuple[float, float]) -> None:
    worst = printed(binary, 1.0 + signs[0] * EXP2_ERROR, 1.0 + signs[1] * RECIPROCAL_ERROR)
    worst = worst[len(FORMS) * len(SPECIAL) :]
    bounds = []
    for name, (_, low, _) in FORMS.items():
        ends = [(f"{name}, x > 0", RELATIVE), (f"{name}, x < 0", RELATIVE)]
        bounds += [*ends, (f"{name}, far left", FAR_LEFT)] if low > -3e38 else ends
    assert len(worst) == len(bounds)
    for (what, bound), error in zip(bounds, worst, strict=True):
        assert error <= bound, (what, error, bound)


def test_special_values(binary: Path) -> None:
    """Those of PyTorch's formulas, the sign of a zero included."""
    values = iter(printed(binary))
    for name in FORMS:
        found = [next(values) for _ in SPECIAL]
        for point, value, wanted in zip(SPECIAL, found, AT_SPECIAL[name], strict=True):
            same = math.isnan(value) if math.isnan(wanted) else repr(value) == repr(wanted)
            assert same, (name, point, value, wanted)
