"""How an elementwise kernel's threads share out a matrix, and a matrix its rows, under plain g++."""

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


QUOTIENTS = r"""
#include "open/contract.h"

#include <cstdio>
#include <initializer_list>

int main() {
  const int64_t most = 0x7fffffff;
  int64_t checked = 0;
  const auto check = [&](int64_t count, int64_t row) {
    if (row < 0 || row > most) return true;
    ++checked;
    const int64_t found = epigemm::open::SharedRows::by(count).of(row);
    if (found != row / count) std::printf("wrong: row %.0f of %.0f\n", double(row), double(count));
    return found == row / count;
  };
  uint64_t state = 1;
  for (int i = 0; i < 200000; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    int64_t count = static_cast<int64_t>(state >> 33) >> (i % 31);
    // Small ones, powers of two and their neighbours, and any others.
    if (i < 5000) count = i;
    if (i % 7 == 0) count = (int64_t{1} << (i % 31)) + i % 3 - 1;
    if (count < 1) count = 1;
    const int64_t quotient = static_cast<int64_t>(state % (most / count + 1));
    for (const int64_t row : {int64_t{0}, most, count - 1, count, quotient * count - 1, quotient * count}) {
      if (!check(count, row)) return 0;
    }
  }
  std::printf("%d", checked > 1000000);
}
"""


def test_each_row_reads_one_of_the_rows_that_are_shared(tmp_path: Path) -> None:
    """The quotient of the kernels is exact."""
    assert printed(compiled(QUOTIENTS, tmp_path, "-O1")) == ["1"]
