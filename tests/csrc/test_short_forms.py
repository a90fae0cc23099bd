"""What `Rounded` calls in place of the library, under g++: every form against fp64, over the floats of all sizes.

A GPU's 2^x and 1 / x are one instruction each, off by at most 2 and 1 units in the last place (PTX ISA, ex2.approx.ftz
and rcp.approx.ftz), its logarithm by 2^-22, its tanh by 2^-10.987. Here they are disturbed by as much, in both
directions, so an error that stays below the bound stays below it on a GPU, too. A GPU also contracts products and sums,
which only leaves roundings out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epigemm.epilogues.tracer.source import prelude
from tests.support.functors import compiled, needs_compiler, printed
from tests.support.thorough import is_thorough

pytestmark = needs_compiler

RELATIVE = 2.0**-17  # what csrc/epilogue/primitives/short.h says of all of them but `ERRORS`
FAR_LEFT = 2.0**-40  # and where the error is no longer relative, absolutely,
FAR_ERRORS = {**dict.fromkeys(["sin", "cos"], 2.0**-19), "gelu_bfloat16": 2.0**-38}  # but of these
ERRORS = {
    **dict.fromkeys(["asinh", "acosh", "atanh", "atan2"], 2.0**-18),
    **dict.fromkeys(["sin", "cos", "tan"], 2.0**-19),
    "hypot": 2.0**-21,
    # csrc/epilogue/primitives/short_bfloat16.h
    "tanh_bfloat16": 2.0**-10.98,
    "gelu_bfloat16": 2.0**-11.39,
    **dict.fromkeys(["expm1_bfloat16", "log1p_bfloat16"], 2.0**-11.3),
}
EXP2_ERROR, RECIPROCAL_ERROR, TANH_ERROR = 2.0**-22, 2.0**-23, 2.0**-10.987
# Of the floats one by one: neighbours differ in their roundings alone.
STRIDE = 251 if is_thorough() else 2503
LEAST = 2.0**-126

# name: fp64, and the ends within which the error is relative.
FORMS = {
    "tanh": ("std::tanh(x)", -3e38, 3e38),
    "expm1": ("std::expm1(x)", -3e38, 88.7),
    "gelu": ("0.5 * x * std::erfc(-x * 0.70710678118654752440)", -6.0, 3e38),
    "tanh_bfloat16": ("std::tanh(x)", -3e38, 3e38),
    "expm1_bfloat16": ("std::expm1(x)", -3e38, 88.7),
    "log1p_bfloat16": ("std::log1p(x)", -0.5, 3e38),
    "gelu_bfloat16": ("0.5 * x * std::erfc(-x * 0.70710678118654752440)", -6.0, 3e38),
    "gelu_tanh": ("x / (1.0 + std::exp(-1.59576912160573071 * (x + 0.044715 * x * x * x)))", -6.0, 3e38),
    **{name: (f"std::{name}(x)", -1e5, 1e5) for name in ("sin", "cos", "tan")},
    "asinh": ("std::asinh(x)", -3e38, 3e38),
    "atanh": ("std::atanh(x)", -0.99999994, 0.99999994),
    "acosh": ("std::acosh(x)", 1.0000001, 3e38),
}
# Of two numbers, at every pair of some: fp64, and the results within which the error is relative.
PAIRS = {
    "pow": ("std::pow(a, b)", 2.0**-24, 65504.0, 2.0**-18),
    "pow_far": ("std::pow(a, b)", 2.0**-126, 3e38, 2.0**-15),
    "atan2": ("std::atan2(a, b)", 2.0**-126, 4.0, ERRORS["atan2"]),
    "hypot": ("std::hypot(a, b)", 2.0**-126, 3e38, ERRORS["hypot"]),
}
SPECIAL = ["0.0f", "-0.0f", "INFINITY", "-INFINITY", "NAN", "3e38f", "-3e38f"]
INF, NAN = math.inf, math.nan
FAR = float(torch.tensor(3e38, dtype=torch.float32))
AT_SPECIAL = {
    "tanh": [0.0, -0.0, 1.0, -1.0, NAN, 1.0, -1.0],
    "tanh_bfloat16": [0.0, -0.0, 1.0, -1.0, NAN, 1.0, -1.0],
    "expm1": [0.0, -0.0, INF, -1.0, NAN, INF, -1.0],
    "expm1_bfloat16": [0.0, -0.0, INF, -1.0, NAN, INF, -1.0],
    "log1p_bfloat16": [0.0, -0.0, INF, NAN, NAN, math.log1p(FAR), NAN],
    "gelu": [0.0, -0.0, INF, NAN, NAN, 3e38, -0.0],
    "gelu_bfloat16": [0.0, -0.0, INF, NAN, NAN, 3e38, -0.0],
    "gelu_tanh": [0.0, -0.0, INF, NAN, NAN, 3e38, -0.0],
    "sin": [0.0, -0.0, NAN, NAN, NAN, math.sin(FAR), -math.sin(FAR)],
    "cos": [1.0, 1.0, NAN, NAN, NAN, math.cos(FAR), math.cos(FAR)],
    "tan": [0.0, -0.0, NAN, NAN, NAN, math.tan(FAR), -math.tan(FAR)],
    "asinh": [0.0, -0.0, INF, -INF, NAN, math.asinh(FAR), -math.asinh(FAR)],
    "atanh": [0.0, -0.0, NAN, NAN, NAN, NAN, NAN],
    "acosh": [NAN, NAN, INF, NAN, NAN, math.acosh(FAR), NAN],
}

PROGRAM = """
using epigemm::math::bits_of, epigemm::math::of_bits;

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

// At how many pairs a value is another one.
template <class Form, class Exact>
void special_pairs(Form form, Exact exact) {
  int wrong = 0;
  const float numbers[] = {0.0f, -0.0f, 0.5f, -0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 3.0f, -3.0f, INFINITY, -INFINITY, NAN};
  for (float a : numbers) {
    for (float b : numbers) {
      const double wanted = exact(double(a), double(b)), found = form(a, b);
      const bool is_near = wanted == found || std::fabs(found - wanted) <= 1e-5 * std::fabs(wanted);
      const bool is_right = wanted == wanted ? is_near && std::signbit(wanted) == std::signbit(found) : found != found;
      wrong += !is_right;
      if (!is_right) std::fprintf(stderr, "%g, %g: %g, not %g\\n", a, b, found, wanted);
    }
  }
  std::printf("%d\\n", wrong);
}

// As `sweep`, of pairs whose results lie within `least` and `most` in size.
template <class Form, class Exact>
void sweep_pairs(Form form, Exact exact, double least, double most) {
  double worst = 0.0;
  for (std::uint32_t bits = bits_of(1e-30f); bits <= bits_of(1e30f); bits += 359 * STRIDE) {
    for (int step = -400; step <= 400; ++step) {
      const float a = of_bits(bits), near = (step < 0 ? -1.0f : 1.0f) * of_bits(bits + 9973 * step);
      const float b = step % 2 ? 0.0625f * step : near;
      for (float sign : {1.0f, -1.0f}) {
        const double wanted = exact(double(sign * a), double(b)), size = std::fabs(wanted);
        if (!(size >= least && size <= most)) continue;
        const double error = std::fabs(form(sign * a, b) - wanted) / size;
        if (!(error <= worst)) worst = error == error ? error : INFINITY;
      }
    }
  }
  std::printf("%.9g\\n", worst);
}

// At how many angles the near form is another one.
template <class Form>
void count_near(Form form) {
  long wrong = 0;
  const auto look = [&](float x) {
    bool is_far = false, stays = true;
    const float near = form(x, is_far), full = form(x);
    form(x, stays);
    const bool is_same = bits_of(near) == bits_of(full) || (near != near && full != full);
    wrong += is_far != (std::fabs(x) > 1e5f) || !(is_far || is_same) || !stays;
  };
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += STRIDE) look(of_bits(bits)), look(-of_bits(bits));
  for (float x : {1e5f, -1e5f, of_bits(0x47c35001u), INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 3e38f}) look(x);
  std::printf("%ld\\n", wrong);
}

void quotients() {
  using namespace epigemm::math;
  using epigemm::Rounded;
  long seen = 0, near_ones = 0, wrong = 0;
  const auto look = [&](float a, float b, bool is_small) {
    const auto compare = [&](float near, float full, const bool& is_far) {
      const bool is_same = bits_of(near) == bits_of(full) || (near != near && full != full);
      ++seen, near_ones += !is_far;
      wrong += !is_far && !is_same;
      wrong += is_far && is_small;
    };
    bool of_fmod = false, of_remainder = false, of_floor = false, stays = true;
    const Rounded left(a), right(b);
    compare(short_form::fmod(a, b, of_fmod), fmod(a, b), of_fmod);
    compare(remainder(left, right, of_remainder).value, remainder(a, b), of_remainder);
    compare(short_form::floor_div(a, b, of_floor), floor_div(a, b), of_floor);
    short_form::fmod(a, b, stays);
    wrong += !stays + (floor_div(left, right).value != floor_div(a, b) && floor_div(a, b) == floor_div(a, b));
  };
  std::uint64_t state = 1;
  const auto drawn = [&] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return std::uint32_t(state >> 32);
  };
  for (long i = 0; i < 300000; ++i) {
    // Any bits; sizes within 2^18 of one another; multiples of the divisor, and their neighbours.
    const float any = of_bits(drawn()), b = of_bits((drawn() & 0x807fffffu) | (100u + drawn() % 54u) << 23);
    const float near = b * (1.0f + float(drawn() >> 14));
    look(any, of_bits(drawn()), false);
    look(near, b, true), look(-near, b, true), look(b, near, true);
    const float whole = b * float(drawn() % 2048u);
    for (unsigned more = 0; more < 3; ++more) look(of_bits(bits_of(whole) - 1u + more), b, whole != 0.0f);
  }
  const float numbers[] = {0.0f,  -0.0f, 1.0f,    -1.0f,   0.5f,  3.0f,     -3.0f,    7.5f,     1e-38f, -1e-40f,
                           1e38f, 3e38f, -3.4e38f, 1048576.0f, 1048577.0f, INFINITY, -INFINITY, NAN, 1.17549435e-38f};
  for (float a : numbers) {
    for (float b : numbers) look(a, b, false);
  }
  std::printf("%ld %d\\n", wrong, 2 * near_ones > seen);
}

// The worst absolute error, and the worst relative one of logarithms of sums with 1.
template <class Number>
void logaddexp() {
  double worst = 0.0, worst_of_result = 0.0;
  for (int way = 0; way < 2; ++way) {
    for (float a : {0.0f, 0.5f, -0.6f, 1.0f, -1.0f}) {
      for (int step = 0; step < 200000; ++step) {
        const float b = a - 0.0004f * float(step);
        const Number left(way ? a : b), right(way ? b : a);
        for (bool is_two : {false, true}) {
          const double sum = double(b) - double(a), size = is_two ? 1.0 / std::log(2.0) : 1.0;
          const double wanted = double(a) + size * std::log1p(is_two ? std::exp2(sum) : std::exp(sum));
          const Number found = is_two ? epigemm::math::logaddexp2(left, right) : epigemm::math::logaddexp(left, right);
          const double error = std::fabs(double(found.value) - wanted);
          worst = error > worst ? error : worst;
          if (a == 0.0f && error > worst_of_result * wanted) worst_of_result = error / wanted;
        }
      }
    }
  }
  std::printf("%.9g %.9g\\n", worst, worst_of_result);
}
"""


def disturbed(text: str) -> str:
    """The headers with errors set from outside: of 2^x, of its sign of a logarithm and of tanh, and of 1 / x."""
    for found, put in (
        ("return __builtin_exp2f(x);", "return __builtin_exp2f(x) * exp2_factor;"),
        (
            "return ::log2f(x);",
            "const float y = ::log2f(x), size = ::fminf(::fmaxf(1.0f, ::fabsf(y)), 200.0f);\n"
            "  return y + (exp2_factor - 1.0f) * size;",
        ),
        (
            "return ::tanhf(x);",
            f"return ::tanhf(x) * (1.0f + {TANH_ERROR / EXP2_ERROR}f * (exp2_factor - 1.0f));",
        ),
        (
            "T reciprocal_normal(T x) {\n  return T(1) / x;",
            "T reciprocal_normal(T x) {\n  return T(1) / x * T(reciprocal_factor);",
        ),
    ):
        assert text.count(found) == 1, found
        text = text.replace(found, put)
    return text


def ends(name: str) -> list[tuple[float, float, float, bool]]:
    """What is swept: the bound, from where and to where, and whether the error is relative."""
    _, low, high = FORMS[name]
    bound, far = ERRORS.get(name, RELATIVE), FAR_ERRORS.get(name, FAR_LEFT)
    found = [(bound, max(LEAST, low), high, True)]
    found += [(bound, -LEAST, low, True)] if low < 0 else []
    if name != "tan":  # of which an angle is swept
        found += [(far, low, -3e38, False)] if low in (-6.0, -1e5) else []
        found += [(far, high, 3e38, False)] if high == 1e5 else []
    return found


def calls(name: str) -> Iterator[str]:
    """The sweeps of a form, in the order of `ends`."""
    exact = FORMS[name][0]
    form = f"[](float x) {{ return epigemm::math::short_form::{name}(x); }}"  # some have two forms
    for _, start, end, is_relative in ends(name):
        yield f"sweep({form}, [](double x) {{ return {exact}; }}, {start}f, {end}f, {str(is_relative).lower()});"


def text() -> str:
    """One program: what its first argument names, with the errors that are set."""
    special = [
        f'for (float x : {{{", ".join(SPECIAL)}}}) std::printf("%.9g\\n", epigemm::math::short_form::{name}(x));'
        for name in FORMS
    ]
    errors = [call for name in FORMS for call in calls(name)]
    angle = "[](float x) { return std::atan(double(epigemm::math::short_form::tan(x))); }"
    errors.append(f"sweep({angle}, [](double x) {{ return std::atan(std::tan(x)); }}, 1e5f, 3e38f, false);")
    for name, (exact, least, most, _) in PAIRS.items():
        form = f"epigemm::math::short_form::{name.removesuffix('_far')}, [](double a, double b) {{ return {exact}; }}"
        special.append(f"special_pairs({form});")
        errors.append(f"sweep_pairs({form}, {least}, {most});")
    near = [
        f"count_near([](float x, auto&... is_far) {{ return epigemm::math::short_form::{name}(x, is_far...); }});"
        for name in ("sin", "cos", "tan")
    ]
    parts = {
        "special": special,
        "errors": errors,
        "near": near,
        "quotients": ["quotients();"],
        "logaddexp": ["logaddexp<epigemm::Rounded>();", "logaddexp<epigemm::RoundedToBFloat16>();"],
    }
    includes = ["cmath", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "initializer_list"]
    lines = [f"#include <{name}>" for name in includes]
    lines += ["static float exp2_factor = 1.0f, reciprocal_factor = 1.0f;", disturbed(prelude())]
    lines += [PROGRAM.replace("STRIDE", str(STRIDE)), "int main(int, char** given) {"]
    lines += ["  exp2_factor = std::atof(given[2]), reciprocal_factor = std::atof(given[3]);"]
    for part, statements in parts.items():
        lines += [f'  if (std::strcmp(given[1], "{part}") == 0) {{', *statements, "  }"]
    return "\n".join([*lines, "}"])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(text(), tmp_path_factory.mktemp("short_forms"), "-O2")


def numbers(program: Path, part: str, *signs: float) -> list[float]:
    """With the errors of 2^x and 1 / x in these directions."""
    exp2, reciprocal = signs or (0.0, 0.0)
    factors = 1.0 + exp2 * EXP2_ERROR, 1.0 + reciprocal * RECIPROCAL_ERROR
    return [float(word) for word in printed(program, part, *map(repr, factors))]


@pytest.mark.parametrize("signs", [*itertools.product((-1.0, 1.0), repeat=2)], ids=str)
def test_errors(program: Path, signs: tuple[float, float]) -> None:
    worst = numbers(program, "errors", *signs)
    bounds = [(f"{name}, {start}", bound) for name in FORMS for bound, start, *_ in ends(name)]
    bounds.append(("the angle of tan, far", 2.0**-20))
    bounds += [(name, bound) for name, (_, _, _, bound) in PAIRS.items()]
    assert len(worst) == len(bounds)
    for (what, bound), error in zip(bounds, worst, strict=True):
        assert error <= bound, (what, error, bound)


def test_special_values(program: Path) -> None:
    """Those of PyTorch's formulas, the sign of a zero included."""
    values = iter(numbers(program, "special"))
    for name in FORMS:
        found = [next(values) for _ in SPECIAL]
        for point, value, wanted in zip(SPECIAL, found, AT_SPECIAL[name], strict=True):
            near = abs(value - wanted) <= 1e-5 * abs(wanted) if math.isfinite(wanted) else value == wanted
            signs = math.copysign(1.0, value) == math.copysign(1.0, wanted)
            same = math.isnan(value) if math.isnan(wanted) else near and signs
            assert same, (name, point, value, wanted)
    assert list(values) == [0.0] * len(PAIRS)


def test_near_forms(program: Path) -> None:
    """Up to 1e5, and of NaN, those of angles have the bits of the forms for all angles; beyond, they say so alone."""
    assert numbers(program, "near") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
def test_near_quotients(program: Path, sign: float) -> None:
    """Where they say that they are right, they have the library's bits; up to a quotient of 2^18 they are right."""
    assert numbers(program, "quotients", 0.0, sign) == [0.0, 1.0]


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logaddexp(program: Path, sign: float) -> None:
    """Its logarithm is off by at most 2^-20, and relatively by as much as `log1p`."""
    found = numbers(program, "logaddexp", sign, 0.0)
    assert found[0] <= 2.0**-20 and found[2] <= 2.0**-20, found
    assert found[1] <= 2.0**-15 and found[3] <= ERRORS["log1p_bfloat16"], found
