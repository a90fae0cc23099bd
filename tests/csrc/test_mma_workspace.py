"""The workspace of sums where CTAs share the K of an mma.sync kernel's tile: csrc/gemm/sm80_mma/shares.h."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.functors import compiled, needs_compiler, printed

pytestmark = needs_compiler

PROGRAM = r"""
#include "gemm/sm80_mma/shares.h"

#include <cstdio>
#include <cstdlib>

// Arguments: 0 for bf16, else the arithmetic of fp32; tile, M, N, K, splits.
int main(int, char** given) {
  using namespace epigemm;
  const auto number = [&](int i) { return std::atoi(given[i]); };
  Problem p;
  p.x.element = number(1) == 0 ? ElementType::BFloat16 : ElementType::Float32;
  p.arithmetic = static_cast<Arithmetic>(number(1));
  p.m = number(3), p.n = number(4), p.k = number(5);
  const Plan plan{FamilyId::sm80_mma, number(2), Raster::AlongM, 1, number(6)};
  const auto& tile = sm80_mma::tile_of(p, plan.tile);
  std::printf("%lld %lld\n", static_cast<long long>(sm80_mma::units_of(p, tile)),
              static_cast<long long>(sm80_mma::split_workspace_bytes(p, plan)));
}
"""
BF16, TF32, SPLIT, SCALED = range(4)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(PROGRAM, tmp_path_factory.mktemp("workspace"))


@pytest.mark.parametrize(
    ("given", "units", "counters", "sums"),
    [
        ((BF16, 6, 64, 4096, 4096, 4), 64, 256, 4 * 64 * 64 * 64),
        ((BF16, 6, 65, 4097, 4097, 4), 65, 768, 4 * 130 * 64 * 64),
        ((BF16, 7, 16, 4096, 8, 2), 1, 256, 2 * 64 * 16 * 64),
        ((BF16, 4, 1, 1, 33, 2), 2, 256, 2 * 128 * 128),
        ((TF32, 1, 128, 256, 40, 2), 3, 256, 2 * 2 * 128 * 128),
        # Two slices share a block of 64 columns, which is two stages.
        ((SPLIT, 1, 64, 128, 130, 2), 3, 256, 2 * 64 * 128),
        ((SCALED, 2, 64, 128, 130, 2), 3, 256, 2 * 2 * 64 * 64),
        ((BF16, 6, 64, 4096, 4096, 1), 64, 0, 0),
    ],
)
def test_its_bytes(program: Path, given: tuple[int, ...], units: int, counters: int, sums: int) -> None:
    """A counter of 4 bytes for each tile, in sections of 256, and the sums of each tile and part."""
    assert list(map(int, printed(program, *given))) == [units, counters + 4 * sums]
