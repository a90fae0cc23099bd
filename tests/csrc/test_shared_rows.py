"""Which row of a matrix each row of a result reads, where several read one: the quotient of the kernels, under g++."""

from __future__ import annotations

from pathlib import Path

from tests.support.functors import compiled, needs_compiler, printed

pytestmark = needs_compiler

PROGRAM = r"""
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


def test_the_quotient_is_exact(tmp_path: Path) -> None:
    assert printed(compiled(PROGRAM, tmp_path, "-O1")) == ["1"]
