"""How an elementwise kernel's threads share out a matrix: every element has one thread, under plain g++."""

from __future__ import annotations

from pathlib import Path

from tests.support.functors import compiled, needs_compiler, printed

pytestmark = needs_compiler

PROGRAM = r"""
#include "elementwise/tiling.h"

#include <cstdio>
#include <vector>

using namespace epigemm::cuda;

bool is_covered_once(int64_t m, int64_t n, int width, int rows) {
  const Tiling tiling = tiling_of(m, n, width, rows);
  std::vector<int> visits(m * n, 0);
  for (uint32_t block = 0; block < tiling.blocks; ++block) {
    for (int y = 0; y < tiling.down(); ++y) {
      for (int x = 0; x < tiling.across; ++x) {
        const Place place =
            place_of(block, tiling.blocks_across, x, y, tiling.across, tiling.down(), width, rows);
        for (int64_t i = place.row; i < place.row + rows && i < m; ++i) {
          for (int64_t j = place.column; j < place.column + width && j < n; ++j) ++visits[i * n + j];
        }
      }
    }
  }
  for (const int count : visits) {
    if (count != 1) return false;
  }
  return tiling.across * tiling.down() == kThreads;
}

// Too large to walk: the last thread of the last block is at the end, and no block is too many.
bool reaches_the_end(int64_t m, int64_t n, int width, int rows) {
  const Tiling t = tiling_of(m, n, width, rows);
  if (t.blocks >= int64_t(1) << 31) return false;
  const Place last = place_of(t.blocks - 1, t.blocks_across, t.across - 1, t.down() - 1, t.across, t.down(),
                                    width, rows);
  return last.row + rows >= m && last.column + width >= n && t.blocks % t.blocks_across == 0;
}

int main() {
  int failures = 0;
  for (const int64_t m : {1, 2, 3, 31, 257, 1000}) {
    for (const int64_t n : {1, 7, 8, 9, 64, 255, 264, 1001}) {
      for (const int width : {1, 2, 4, 8}) {
        for (const int rows : {1, 2}) failures += !is_covered_once(m, n, width, rows);
      }
    }
  }
  const int64_t huge = int64_t(1) << 35;
  failures += !reaches_the_end(1, huge, 8, 2) + !reaches_the_end(huge, 1, 1, 1);
  failures += !reaches_the_end(1 << 20, 1 << 15, 4, 1);
  std::printf("%d\n", failures);
}
"""


def test_every_element_has_one_thread(tmp_path: Path) -> None:
    assert printed(compiled(PROGRAM, tmp_path, "-O2")) == ["0"]
