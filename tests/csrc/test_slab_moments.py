"""Parts of kernels under plain g++: statistics of a slab in shared memory; which thread has which elements."""

from __future__ import annotations

from pathlib import Path

from tests.support.functors import compiled, needs_compiler, printed

pytestmark = needs_compiler

PROGRAM = r"""
#include "gemm/sm90/slab.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

using namespace epigemm;

alignas(1024) char memory[16384];
std::vector<uint32_t> words_read;  // addresses, in their order

struct Load {
  static uint32_t word(uint32_t address) {
    uint32_t word;
    words_read.push_back(address);
    std::memcpy(&word, memory + address, 4);
    return word;
  }
};

struct BFloat16 {
  static constexpr int kCount = 2;
  static float at(uint32_t word, int i) {
    const uint32_t bits = (i ? word >> 16 : word) << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
  }
  static void put(char* to, float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    std::memcpy(to, reinterpret_cast<char*>(&bits) + 2, 2);
  }
};

struct Float32 {
  static constexpr int kCount = 1;
  static float at(uint32_t word, int) {
    float number;
    std::memcpy(&number, &word, 4);
    return number;
  }
  static void put(char* to, float number) { std::memcpy(to, &number, 4); }
};

// As TMA swizzles: of the address within 1024 bytes, the bits of the 16 bytes' place change by those of the line of 128
// bytes; of 64-byte rows only two of these bits.
int swizzle(int address, int row_bytes) {
  const int line = address / 128 % 8;
  return address ^ ((row_bytes == 128 ? line : line & 3) << 4);
}

float number_of(int row, int column, float mean) {
  const uint32_t mixed = (row * 2654435761u ^ column * 40503u) * 2246822519u;
  return mean + (static_cast<int>(mixed >> 16 & 255) - 128);
}

// The word, or the half of one, in which a number is stored.
template <class Numbers>
uint32_t stored(int row, int column, float mean) {
  char bytes[4] = {};
  Numbers::put(bytes, number_of(row, column, mean));
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

void add(PivotSums<float>& sums, const PivotSums<float>& others) {
  sums.sum += others.sum;
  sums.squares += others.squares;
}

// The words that lanes read at once, by bank.
struct Banks {
  std::vector<uint32_t> seen[32];

  // How many different words of the bank there are now.
  int note(uint32_t address) {
    std::vector<uint32_t>& of_bank = seen[address / 4 % 32];
    for (const uint32_t each : of_bank) {
      if (each == address) return static_cast<int>(of_bank.size());
    }
    of_bank.push_back(address);
    return static_cast<int>(of_bank.size());
  }
};

// A whole slab has a constructor of its own.
template <int kSlabRows, class Lane>
Lane of_rows(uint32_t slab, uint32_t warp, uint32_t lane, int rows) {
  return rows == kSlabRows ? Lane(slab, warp, lane) : Lane(slab, warp, lane, rows);
}

// The largest error of a slab's column statistics, relative to the deviations.
template <class Numbers, int kRowBytes, int kSlabRows>
double error(int rows, float mean) {
  constexpr int kBytes = 4 / Numbers::kCount, kColumns = kRowBytes / kBytes;
  using Lane = sm90::SlabMoments<Numbers, kRowBytes, kSlabRows, Load>;
  const uint32_t slab = 2048;
  std::memset(memory, 0xff, sizeof memory);  // NaN
  std::vector<double> means(kColumns), squares(kColumns);
  for (int column = 0; column < kColumns; ++column) {
    for (int row = 0; row < rows; ++row) {
      const uint32_t word = stored<Numbers>(row, column, mean);
      std::memcpy(memory + slab + swizzle(row * kRowBytes + column * kBytes, kRowBytes), &word, kBytes);
      means[column] += Numbers::at(word, 0) / double(rows);
    }
    for (int row = 0; row < rows; ++row) {
      squares[column] += std::pow(Numbers::at(stored<Numbers>(row, column, mean), 0) - means[column], 2);
    }
  }
  double worst = 0;
  std::vector<int> seen(kColumns);
  for (int warp = 0; warp < sm90::kReducingWarps; ++warp) {
    for (uint32_t lane = 0; lane < Lane::kWords; ++lane) {
      Lane found = of_rows<kSlabRows, Lane>(slab, warp, lane, rows);
      for (uint32_t other = lane + Lane::kWords; other < 32; other += Lane::kWords) {
        const Lane of_other = of_rows<kSlabRows, Lane>(slab, warp, other, rows);
        for (int i = 0; i < Numbers::kCount; ++i) add(found.columns[i], of_other.columns[i]);
      }
      for (int i = 0; i < Numbers::kCount; ++i) {
        const uint32_t at = Lane::column_of(warp, lane) + i;
        ++seen[at];
        const BlockMoments<float> moments = found.columns[i].moments(rows);
        const double of_mean = std::fabs(moments.mean - means[at]) / (100 + std::fabs(mean));
        const double of_squares = std::fabs(moments.squares - squares[at]) / (1 + squares[at]);
        const double both = of_mean + of_squares;
        worst = both <= worst ? worst : both;
        if (std::isnan(both)) worst = std::numeric_limits<double>::infinity();
      }
    }
  }
  for (const int count : seen) {
    if (count != 1) worst = std::numeric_limits<double>::infinity();
  }
  return worst;
}

// The most different words that lanes of a warp read in one bank at once: of whole slabs, in all accesses.
template <class Numbers, int kRowBytes>
int conflicts() {
  int worst = 0;
  for (int warp = 0; warp < sm90::kReducingWarps; ++warp) {
    std::vector<Banks> of_access(64);
    for (int lane = 0; lane < 32; ++lane) {
      words_read.clear();
      sm90::SlabMoments<Numbers, kRowBytes, 64, Load>(2048, warp, lane);
      for (std::size_t i = 0; i < words_read.size(); ++i) worst = std::max(worst, of_access[i].note(words_read[i]));
    }
  }
  return worst;
}

template <class Numbers, int kRowBytes, int kSlabRows>
double worst_of() {
  double worst = 0;
  for (int rows = 1; rows <= kSlabRows; ++rows) {
    for (const float mean : {0.0f, 10000.0f}) {
      const double found = error<Numbers, kRowBytes, kSlabRows>(rows, mean);
      worst = found <= worst ? worst : found;
    }
  }
  return worst;
}

int main() {
  std::printf("%g %g %g %g %g %g\n", worst_of<BFloat16, 128, 64>(), worst_of<BFloat16, 64, 64>(),
              worst_of<BFloat16, 128, 48>(), worst_of<BFloat16, 128, 80>(), worst_of<Float32, 128, 64>(),
              worst_of<Float32, 64, 64>());
  std::printf("%d %d %d %d\n", conflicts<BFloat16, 128>(), conflicts<BFloat16, 64>(), conflicts<Float32, 128>(),
              conflicts<Float32, 64>());
  // A block of equal numbers has no deviation; NaN stays.
  PivotSums<float> equal{3.1f};
  for (int i = 0; i < 64; ++i) equal.add(3.1f);
  PivotSums<float> broken{1.0f};
  broken.add(1.0f);
  broken.add(std::numeric_limits<float>::quiet_NaN());
  const BlockMoments<float> of_equal = equal.moments(64), of_broken = broken.moments(2);
  std::printf("%d %d", of_equal.mean == 3.1f && of_equal.squares == 0,
              std::isnan(of_broken.mean) && std::isnan(of_broken.squares));
  // A mean is infinite where the sum is, wherever the infinity stands.
  const float inf = std::numeric_limits<float>::infinity();
  const auto of_three = [](float first, float second, float third) {
    PivotSums<float> sums{pivot_of(first)};
    for (const float each : {first, second, third}) sums.add(each);
    return sums.moments(3);
  };
  std::printf(" %d %d %d\n", of_three(inf, 1, 2).mean == inf && of_three(1, 2, inf).mean == inf,
              of_three(-inf, 1, -inf).mean == -inf && std::isnan(of_three(-inf, 1, 2).squares),
              std::isnan(of_three(inf, 1, -inf).mean) && std::isnan(of_three(inf - inf, 1, 2).mean));
}
"""


def test_lanes_read_each_number_once(tmp_path: Path) -> None:
    """Slabs of every width and height that tiles have, with any number of rows, and a mean of 10,000."""
    words = printed(compiled(PROGRAM, tmp_path, "-O1", "-Wno-unknown-pragmas"))
    errors, conflicts, flags = words[:6], words[6:10], words[10:]
    assert all(0 < float(error) < 2e-6 for error in errors), errors
    assert conflicts == ["1"] * 4, "no two lanes read different words of a bank at once"
    assert flags == ["1"] * 5


# --- how an elementwise kernel's threads share out a matrix, and a matrix its rows ------------------------------------


TILING = r"""
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
    assert printed(compiled(TILING, tmp_path, "-O2")) == ["0"]


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
