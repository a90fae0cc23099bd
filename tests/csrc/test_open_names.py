"""The names of open kernels, under plain g++: each stands for one kernel, and the build makes that kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import epigemm
from tests.support.functors import CSRC, compiled, needs_compiler, printed

pytestmark = needs_compiler

PROGRAM = r"""
#include "elementwise/kernels.h"
#include "gemm/planner/family.h"

#include <cstdio>

using namespace epigemm;

const EpilogueInfo& epigemm::epilogue_info(EpilogueId) {
  static const Operand operands[] = {{OperandKind::Accumulator, OperandElement::Compute, "accumulator"}};
  static const EpilogueInfo info{{}, "test", nullptr, true, operands, 1, false, 0, 0};
  return info;
}

int epigemm::first_matrix(const EpilogueInfo&) { return 0; }

bool epigemm::has_compiled_elementwise(EpilogueId) { return false; }

void print(open::KernelName name) { std::printf("%.*s\n", static_cast<int>(name.size()), name.data()); }

// Those of all tiles.
void print_kernels(const Problem& problem) {
  for (int id = 0; id < kFamilyCount; ++id) {
    const Family& family = family_of(static_cast<FamilyId>(id));
    if (!family.computes(problem)) continue;
    for (int tile = 0; tile < family.tile_count(problem); ++tile) {
      for (auto name : family.kernels(problem, {static_cast<FamilyId>(id), tile})) print(name);
    }
  }
}

// Those of rows in groups, with weights in either order.
void print_grouped(Problem problem) {
  const bool is_of_slices = is_on_slices(problem.arithmetic);
  const FamilyId id = is_of_slices ? FamilyId::sm90_fp16x3 : FamilyId::sm90_tma;
  const Family& family = family_of(id);
  problem.groups.count = 1;
  problem.m = problem.n = problem.k = 1024;
  if (!family.computes(problem)) return;
  for (bool is_transposed : {false, true}) {
    problem.is_weight_transposed = is_transposed;
    for (int tile = 0; tile < family.tile_count(problem); ++tile) {
      const Plan plan{id, tile};
      if (is_of_slices && !family.why_not_planned(problem, plan).empty()) continue;
      for (auto name : family.kernels(problem, plan)) print(name);
    }
  }
}

// Those that read a transposed weight as it lies.
void print_transposed(Problem problem) {
  problem.is_weight_transposed = true;
  const Family& family = family_of(FamilyId::sm90_fp16x3);
  for (int tile = 0; tile < family.tile_count(problem); ++tile) {
    const Plan plan{FamilyId::sm90_fp16x3, tile};
    if (!family.reads_weight(problem.arithmetic, plan)) continue;
    print(*family.kernels(problem, plan).begin());
  }
}

int main() {
  for (auto element : {ElementType::Float16, ElementType::BFloat16, ElementType::Float32, ElementType::Float64}) {
    for (auto which :
         {ElementwiseKernel::Value, ElementwiseKernel::Derivative, ElementwiseKernel::DerivativeSums}) {
      print(elementwise_name(which, element));
    }
    for (auto arithmetic : {Arithmetic::IEEE, Arithmetic::TF32, Arithmetic::Split, Arithmetic::Scaled}) {
      if (element != ElementType::Float32 && arithmetic != Arithmetic::IEEE) continue;
      Problem problem;
      problem.arithmetic = arithmetic;
      problem.is_batch_invariant = problem.is_weight_readable = true;
      problem.x.element = problem.weight.element = problem.out.element = element;
      print_kernels(problem);
      if (is_on_slices(arithmetic)) print_transposed(problem);
      print_grouped(problem);
      problem.is_pair = true;
      print_kernels(problem);
      print_grouped(problem);
    }
  }
  Problem few;
  few.x.element = few.weight.element = few.out.element = ElementType::Float32;
  print_kernels(few);
  constexpr auto kE4M3 = ElementType::Float8E4M3, kE5M2 = ElementType::Float8E5M2;
  for (auto x : {kE4M3, kE5M2}) {
    for (auto weight : {kE4M3, kE5M2}) {
      for (auto result : {ElementType::Float16, ElementType::BFloat16, ElementType::Float32, ElementType::Float64,
                          kE4M3, kE5M2}) {
        for (auto arithmetic : {Arithmetic::Fast, Arithmetic::Promoted}) {
          Problem problem;
          problem.arithmetic = arithmetic;
          problem.x.element = x, problem.weight.element = weight, problem.out.element = result;
          for (bool is_of_blocks : {false, true}) {
            if (is_of_blocks && !is_8_bits(result)) continue;
            problem.out_scale.is_of_blocks = is_of_blocks;
            for (bool is_pair : {false, true}) {
              problem.is_pair = is_pair;
              print_kernels(problem);
            }
          }
        }
      }
    }
  }
}
"""

DTYPES = ("float16", "bfloat16", "float32", "float64")
SOURCES = [
    "elementwise/kernels.cpp",
    "gemm/planner/families.cpp",
    "gemm/planner/copies.cpp",
    "gemm/fp16_slices/coverage.cpp",
    *[
        f"gemm/{family}/family.cpp"
        for family in ("sm90_tma", "sm90_swap_ab", "sm90_fp16x3", "sm80_mma", "sm90_few_rows")
    ],
    "gemm/sm80/cublas.cpp",
    "gemm/sm90/coverage.cpp",
    "gemm/sm90/cublas.cpp",
    "gemm/sm90/kernel_names.cpp",
]


def names_of_the_build() -> list[str]:
    """As cmake/EpigemmOpen.cmake and open.cmake of each family count them."""
    names = [
        f"{kind}_{element}" for kind in ("elementwise", "derivative", "derivative_sums") for element in DTYPES
    ]
    for element, tiles in (("float16", 19), ("bfloat16", 19), ("tf32", 11)):
        names += [f"sm90_tma_{element}_{tile}" for tile in range(tiles)]
        if element == "tf32":
            continue
        names += [f"sm90_tma_{element}_{tile}_pair" for tile in range(4)]
        for suffix in ("_grouped", "_grouped_transposed"):
            names += [f"sm90_tma_{element}_{tile}{suffix}" for tile in range(3)]
            names += [f"sm90_tma_{element}_{tile}{suffix}_pair" for tile in range(2)]
    for types, fast, promoted, fast_pairs, promoted_pairs in (
        ("e4m3_e4m3_bfloat16", 11, 9, 2, 1),
        ("e4m3_e4m3_float16", 3, 3, 1, 1),
        ("e4m3_e4m3_float32", 3, 3, 1, 1),
        ("e4m3_e4m3_bfloat16_to_e4m3", 4, 3, 2, 1),
        ("e4m3_e4m3_bfloat16_to_blocks", 3, 2, 2, 0),
        ("e5m2_e4m3_bfloat16", 1, 1, 0, 0),
        ("e4m3_e5m2_bfloat16", 1, 1, 0, 0),
    ):
        names += [f"sm90_tma_{types}_fast_{tile}" for tile in range(fast)]
        names += [f"sm90_tma_{types}_promoted_{tile}" for tile in range(promoted)]
        names += [f"sm90_tma_{types}_fast_{tile}_pair" for tile in range(fast_pairs)]
        names += [f"sm90_tma_{types}_promoted_{tile}_pair" for tile in range(promoted_pairs)]
    names += [f"sm90_swap_ab_{e}_{i}" for e in ("float16", "bfloat16", "tf32") for i in range(8)]
    names += [f"sm80_mma_{e}_{i}" for e in ("float16", "bfloat16") for i in range(10)]
    names += [
        f"sm80_mma_{e}_{i}" for e, tiles in (("tf32", 3), ("split", 2), ("scaled", 3)) for i in range(tiles)
    ]
    names += [f"sm90_fp16x3_split_{i}" for i in range(4)] + [f"sm90_fp16x3_scaled_{i}" for i in range(3)]
    names += [
        f"as_it_lies_{order}{arithmetic}_{i}"
        for order in ("", "transposed_")
        for arithmetic in ("split", "scaled")
        for i in range(4)
    ]
    names += [
        f"as_it_lies_grouped_{order}{arithmetic}_{i}"
        for order in ("", "transposed_")
        for arithmetic in ("split", "scaled")
        for i in range(3)
    ]
    names += [f"sm90_few_rows_{i}" for i in range(4)]
    return sorted(f"epigemm_open_{name}" for name in [*names, "fixup", "fixup_grouped", "sm80_fixup", "fp32"])


def test_families_name_the_kernels_that_are_built(tmp_path: Path) -> None:
    lines = printed(compiled(PROGRAM, tmp_path, *(str(CSRC / name) for name in SOURCES)))
    # Behind every tile on slices.
    fixups = [lines.count(f"epigemm_open_{name}") for name in ("fixup", "sm80_fixup", "fixup_grouped")]
    assert fixups == [4 + 3 + 4 + 4, 2 + 3, 2 * (3 + 3)]
    assert sorted(set(lines)) == names_of_the_build()
    assert len(lines) - sum(fixups) + len(fixups) == len(set(lines)), "two kernels have one name"


def test_the_index_of_this_build_has_every_name() -> None:
    index = Path(epigemm.__file__).parent / "ir" / "index.json"
    if not index.is_file():
        pytest.skip("a build without CUDA")
    assert sorted(json.loads(index.read_text())) == names_of_the_build()
