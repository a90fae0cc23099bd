"""What kernels call, of every functor of the package and of 200 random programs, under g++ against PyTorch in float64.

The text is that which NVRTC gets, with the host's meaning of CUDA's keywords.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from epigemm.epilogues import declaration, formulas, library
from epigemm.epilogues.declaration import Traced, TracedResults, trace
from epigemm.epilogues.kinds import ANNOTATIONS, SLOTS, Matrix, Operand, PerColumn, PerRow, Scalar, slots_of
from epigemm.epilogues.registry import EPILOGUES
from epigemm.epilogues.tracer.source import prelude
from tests.ops.bounds import Off
from tests.support.functors import compiled, needs_compiler
from tools.random_functions import Made

pytestmark = needs_compiler
POINTS, RANDOM, MOST, LIBRARIES = 64, 80, 3, 4
PARTS = ("operand", "apply", "apply_double", "slope_double")
KEYWORDS = {
    "__CUDACC__": "1",
    "__host__": "",
    "__device__": "",
    "__noinline__": "",
    "__forceinline__": "inline",
}
VALUES = ", ".join(f"v[{slot}]" for slot in range(len(SLOTS)))
PROBE = f"""
#define EPIGEMM_PROBE(name) \\
  extern "C" void probe_##name(const double* given, double* out, long n) {{ \\
    constexpr int kIn = 1 + {len(SLOTS)}, kOut = kIn + 2; \\
    for (long i = 0; i < n; ++i, given += kIn, out += kOut) {{ \\
      const double* const v = given + 1; \\
      out[0] = name::epigemm_apply(*given, {VALUES}); \\
      out[1] = name::epigemm_apply_double(*given, {VALUES}); \\
      for (int slot = -1; slot < kIn - 1; ++slot) \\
        out[3 + slot] = name::epigemm_slope_double(*given, {VALUES}, slot); \\
    }} \\
  }} \\
  extern "C" long fours_##name(const double* given, long n) {{ \\
    constexpr int kSlots = {len(SLOTS)}; \\
    long wrong = 0; \\
    for (long first = 0; first + 4 <= n; first += 4) {{ \\
      float accs[4], values[4 * kSlots], found[4]; \\
      for (int i = 0; i < 4; ++i) {{ \\
        accs[i] = given[(first + i) * (1 + kSlots)]; \\
        for (int slot = 0; slot < kSlots; ++slot) \\
          values[i * kSlots + slot] = given[(first + (i & kElement[slot])) * (1 + kSlots) + 1 + slot]; \\
      }} \\
      name::epigemm_apply_four(accs, values, found); \\
      for (int i = 0; i < 4; ++i) {{ \\
        const float* const v = values + i * kSlots; \\
        wrong += !(found[i] == name::epigemm_apply(accs[i], {VALUES})); \\
      }} \\
    }} \\
    return wrong; \\
  }}
// Of four elements the one whose operand an element has: of two rows and two columns.
constexpr int kElement[] = {{{", ".join(str({"c": 1, "s": 0, "r": 2, "m": 3}[slot[0]]) for slot in SLOTS)}}};
"""


class Functor(NamedTuple):
    """One functor: its text for kernels, the kinds of its operands, and PyTorch's function of acc and these."""

    text: str
    kinds: tuple[str, ...]
    function: Callable[..., Tensor]


def of_program(program: Traced) -> Functor:
    return Functor(text_of(program), program.kinds, program.reference)


def text_of(program: Traced, own: tuple[str, str] | None = None) -> str:
    """What `program.kernel_source` puts behind the headers."""
    whole = program.kernel_source([1] * len(program.kinds), PARTS, own=own)
    return whole.removeprefix(prelude("open/functor.h", *([] if own is None else [f"epilogue/{own[0]}.h"])))


def lengthy(acc: Tensor, bias: PerColumn, row: PerRow, factor: Scalar, other: Matrix) -> Tensor:
    """Its four elements are a function that is not inlined."""
    z = torch.sinh(torch.asin(0.1 * torch.clamp(acc + bias * row, -1, 1)))
    return z * torch.log(torch.abs(other) + 1) + torch.sqrt(torch.abs(factor * z))


def of_library() -> dict[str, Functor]:
    """The functors of csrc/epilogue, and the programs of the package, which has one for each of these, too."""
    built_in = {
        name: Functor(
            text_of(each.traced, (name, each.functor)),
            each.traced.kinds,
            lambda acc, *given, each=each: each.reference(acc, given),
        )
        for name, each in EPILOGUES.items()
    }
    built_in["lengthy"] = of_program(trace(lengthy))
    return built_in | {f"{name}_program": of_program(library.traced(name)) for name in formulas.FORMULAS}


def random_functors(seed: int) -> dict[str, Functor]:
    """The last values of a random function, which is traced once."""
    made = Made(seed)
    operands = tuple(Operand(ANNOTATIONS[kind], f"o{place}") for place, kind in enumerate(made.kinds))
    count = min(len(made.steps), MOST)

    def values(*given: Tensor) -> tuple[Tensor, ...]:
        found = [*given]
        for (operator, *_), inputs in made.steps:
            found.append(operator(*(found[place] for place in inputs)))
        return tuple(found[-count:])

    several = declaration._trace(values, operands, "random", __file__)
    assert isinstance(several, TracedResults)
    programs = [several.results.program(each.value) for each in several.results.results]
    return {
        f"random_{seed}_{place}": Functor(
            text_of(Traced("random", operands, program)),
            several.kinds,
            lambda *given, place=place: values(*given)[place],
        )
        for place, program in enumerate(programs)
    }


class Library:
    """Functors, compiled together."""

    def __init__(self, functors: Mapping[str, Functor], folder: Path) -> None:
        headers = prelude("open/functor.h", *(f"epilogue/{name}.h" for name in EPILOGUES))
        names = "".join(
            f"namespace {name} {{\n{each.text}\n}}\nEPIGEMM_PROBE({name})\n"
            for name, each in functors.items()
        )
        # Each functor's functions have one name; here they are in namespaces.
        text = f"{headers}{PROBE}{names}".replace('extern "C" __device__', "static")
        defined = [f"#define {name} {value}" for name, value in KEYWORDS.items()]
        whole = "\n".join(["#include <cstdint>", *defined, text])
        self._loaded = ctypes.CDLL(str(compiled(whole, folder, "-O0", "-w", "-shared", "-fPIC")))

    def __call__(self, name: str, given: Tensor) -> Tensor:
        """Of values `[n, 1 + slots]`: in fp32, in fp64, and the slopes."""
        out = torch.empty(len(given), 3 + len(SLOTS), dtype=torch.float64)
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (given, out))
        getattr(self._loaded, f"probe_{name}")(*pointers, ctypes.c_long(len(given)))
        return out

    def fours(self, name: str, given: Tensor) -> int:
        """Of four elements at once, in fp32: how many are others than one by one."""
        count: int = getattr(self._loaded, f"fours_{name}")(
            ctypes.c_void_p(given.data_ptr()), ctypes.c_long(len(given))
        )
        return count


def points(count: int, rng: torch.Generator) -> list[Tensor]:
    """Numbers of fp32, none of them near 0."""
    signs = torch.randint(2, (count, POINTS), generator=rng) * 2.0 - 1.0
    return [*(signs * (0.25 + 2 * torch.rand(count, POINTS, generator=rng))).double()]


def allowed(run: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    """How far the value may be off in this type: what errors of the function's operations, one by one, do to it."""
    with torch.no_grad(), Off(dtype, is_gpu=False) as counting:
        want = run().clone()
    total = 2 * torch.finfo(dtype).eps * want.abs()
    for at in range(counting.count):
        for sign in (1, -1):
            with torch.no_grad(), Off(dtype, is_gpu=False, at=at, sign=sign):
                total += (run() - want).abs()
    return total + torch.finfo(dtype).tiny


def check(name: str, functor: Functor, functors: Library) -> None:
    """Both values, and the slope by every input that PyTorch's function reads."""
    inputs = [
        each.requires_grad_() for each in points(1 + len(functor.kinds), torch.Generator().manual_seed(7))
    ]
    given = torch.zeros(POINTS, 1 + len(SLOTS), dtype=torch.float64)
    places = [0, *(1 + slot for slot in slots_of(functor.kinds))]
    given[:, places] = torch.stack([each.detach() for each in inputs], 1)
    found = functors(name, given)
    assert functors.fours(name, given) == 0, name
    want = functor.function(*inputs)
    for value, dtype in ((found[:, 0], torch.float32), (found[:, 1], torch.float64)):
        off = (value - want.detach()).abs() / allowed(lambda: functor.function(*inputs), dtype)
        assert bool((off <= 1).all()), f"{name}, {dtype}: {float(off.max()):.3g} times what is allowed"
    slopes: tuple[Any, ...] = (None,) * len(inputs)
    if want.requires_grad:
        slopes = torch.autograd.grad(want.sum(), inputs, allow_unused=True)
    for place, slope in zip(places, slopes, strict=True):
        expected = torch.zeros(POINTS, dtype=torch.float64) if slope is None else slope
        torch.testing.assert_close(
            found[:, 2 + place], expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}"
        )


@pytest.mark.parametrize("part", range(1 + LIBRARIES))
def test_values_and_slopes(part: int, tmp_path: Path) -> None:
    """First those of the package, then random ones."""
    seeds = range(part - 1, RANDOM, LIBRARIES)
    functors = of_library() if part == 0 else {}
    for seed in seeds if part else ():
        functors |= random_functors(seed)
    library_of_all = Library(functors, tmp_path)
    for name, functor in functors.items():
        check(name, functor, library_of_all)
