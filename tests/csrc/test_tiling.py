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
  const Tiling tiling = Tiling::of(m, n, width, rows);
  std::vector<int> visits(m * n, 0);
  for (int64_t thread = 0; thread < tiling.threads; ++thread) {
    const Place place = tiling.place_of<uint64_t>(thread, width, rows);
    const Place same = tiling.place_of<uint32_t>(thread, width, rows);
    if (same.row != place.row || same.column != place.column) return false;
    for (int64_t i = place.row; i < place.row + rows && i < m; ++i) {
      for (int64_t j = place.column; j < place.column + width && j < n; ++j) ++visits[i * n + j];
    }
  }
  for (const int count : visits) {
    if (count != 1) return false;
  }
  return tiling.blocks() * kThreads >= tiling.threads;
}

// Too large to walk: the last thread is at the end, and no block is too many.
bool reaches_the_end(int64_t m, int64_t n, int width, int rows) {
  const Tiling tiling = Tiling::of(m, n, width, rows);
  const Place last = tiling.place_of<uint64_t>(tiling.threads - 1, width, rows);
  return tiling.blocks() < int64_t(1) << 31 && last.row < m && last.row + rows >= m && last.column < n &&
         last.column + width >= n;
}

template <class Remainder>
bool divides(int64_t index, int64_t count) {
  Remainder remainder;
  return Divider::by(count).divide(index, remainder) == index / count &&
         static_cast<int64_t>(remainder) == index % count;
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
  failures += !reaches_the_end(1 << 20, 1 << 15, 4, 1) + !reaches_the_end(3, huge / 4, 1, 2);
  const int64_t most = (int64_t(1) << 31) - 1;
  for (const int64_t count : {int64_t(1), int64_t(2), int64_t(3), int64_t(7), int64_t(1) << 20, most - 1, most}) {
    for (const int64_t times : {0, 1, 2, 1000, 1 << 30}) {
      for (const int64_t more : {int64_t(0), int64_t(1), count - 1}) {
        const int64_t index = count * times + (more < count ? more : 0);
        failures += !divides<uint32_t>(index, count) + !divides<uint64_t>(index, count);
      }
    }
  }
  failures += !divides<uint64_t>(3 * huge + 5, huge) + !divides<uint64_t>(huge - 1, huge + 1);
  std::printf("%d\n", failures);
}
"""


def test_every_element_has_one_thread(tmp_path: Path) -> None:
    assert printed(compiled(PROGRAM, tmp_path, "-O2")) == ["0"]
