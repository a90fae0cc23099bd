"""Functors under g++: many of them in one shared library, on tensors of the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.tracer.source import functor_text, prelude

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(
    COMPILER is None or not CSRC.is_dir(), reason="no C++ compiler, or no sources"
)


def compiled(text: str, folder: Path, *options: str) -> Path:
    """A program, or with `-shared` a library; warnings are errors.

    No contraction: references have none, and a bound on the difference stays derivable.
    """
    folder.mkdir(exist_ok=True)
    source = folder / "source.cpp"
    source.write_text(text)
    strict = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    command = [str(COMPILER), *strict, str(source), *options, "-o", str(folder / "made")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:4000]
    return folder / "made"


def printed(program: Path, *arguments: object) -> list[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


LOOPS = """
template <class Functor, class T, std::size_t... Is>
void values(const T* const* in, T* out, long n, std::index_sequence<Is...>) {
  for (long i = 0; i < n; ++i) out[i] = Functor::apply(in[Is][i]...);
}
template <class Functor, class T, std::size_t... Is>
void slopes(const T* const* in, T* out, long n, int which, std::index_sequence<Is...>) {
  using D = epigemm::Dual<T>;
  for (long i = 0; i < n; ++i) {
    const D result = Functor::apply(D(in[Is][i], T(int(Is) == which), int(Is) != which)...);
    out[i] = result.constant ? T(0) : result.derivative;
  }
}
"""


class Functors:
    """A library of functors: values in fp32 and fp64, derivatives in fp64.

    Args:
        traced: the epilogues, by a name that is an identifier.
        folder: where to compile.
        optimization: what g++ is told.
    """

    def __init__(self, traced: Mapping[str, Traced], folder: Path, optimization: str = "-O1") -> None:
        lines = ["#include <cstddef>", "#include <utility>", prelude(), LOOPS]
        for name, one in traced.items():
            lines.append(functor_text(one.program, one.kinds, f"Functor_{name}"))
            sequence = f"std::make_index_sequence<{len(one.kinds) + 1}>()"
            for number in ("float", "double"):
                lines.append(
                    f'extern "C" void {name}_{number}(const {number}* const* in, {number}* out, long n) '
                    f"{{ values<Functor_{name}>(in, out, n, {sequence}); }}"
                )
            lines.append(
                f'extern "C" void {name}_slope(const double* const* in, double* out, long n, int which) '
                f"{{ slopes<Functor_{name}>(in, out, n, which, {sequence}); }}"
            )
        self._library = ctypes.CDLL(str(compiled("\n".join(lines), folder, optimization, "-shared", "-fPIC")))

    def _call(self, function: str, inputs: tuple[Tensor, ...], *more: int) -> Tensor:
        shape = max(inputs, key=lambda tensor: tensor.numel()).shape
        given = [tensor.expand(shape).contiguous() for tensor in inputs]
        out = torch.empty_like(given[0])
        pointers = (ctypes.c_void_p * len(given))(*[tensor.data_ptr() for tensor in given])
        getattr(self._library, function)(
            pointers, ctypes.c_void_p(out.data_ptr()), ctypes.c_long(out.numel()), *more
        )
        return out

    def values(self, name: str, *inputs: Tensor) -> Tensor:
        """The functor on tensors of one type, broadcast to the largest."""
        kind = {torch.float32: "float", torch.float64: "double"}[inputs[0].dtype]
        return self._call(f"{name}_{kind}", inputs)

    def slopes(self, name: str, which: int, *inputs: Tensor) -> Tensor:
        """Its partial derivative by argument `which`, fp64."""
        return self._call(f"{name}_slope", inputs, which)
