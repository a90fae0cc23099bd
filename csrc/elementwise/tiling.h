// How a matrix is divided among the threads of an elementwise kernel. Host and device both use this file.
#pragma once

#include <algorithm>
#include <cstdint>

#include "epilogue/operands.h"

namespace epigemm::cuda {

constexpr int kThreads = 256;     // of a block
constexpr int kVectorBytes = 16;  // the widest access of a thread

// A block's threads form a rectangle with `across` threads in every row. A thread has `width` neighbouring columns of
// `rows_of_thread` rows; blocks are numbered along the rows.
struct Tiling {
  int across;  // a power of two
  int width;
  int64_t blocks_across, blocks;

  int down() const { return kThreads / across; }
};

// `width` is that of a vector where all rows begin at multiples of it, else 1. The rectangle is the one that leaves the
// fewest threads without work. Threads of a row stay together, so that they share lines of memory.
inline Tiling tiling_of(int64_t m, int64_t n, int width, int rows_of_thread) {
  const auto ceil = [](int64_t a, int64_t b) { return a / b + (a % b != 0); };
  const int64_t threads_across = ceil(n, width), threads_down = ceil(m, rows_of_thread);
  const int least = width > 1 ? 8 : 32;
  Tiling best{};
  double fewest = 0;
  for (int across = kThreads; across > 0; across /= 2) {
    if (across < least && across * 2 <= threads_across) break;
    const int64_t blocks_across = ceil(threads_across, across);
    const int64_t blocks_down = ceil(threads_down, kThreads / across);
    const double blocks = static_cast<double>(blocks_across) * static_cast<double>(blocks_down);
    if (best.across == 0 || blocks < fewest) {
      best = {across, width, blocks_across, blocks_across * blocks_down};
      fewest = blocks;
    }
  }
  return best;
}

// Where a thread's part begins.
struct Place {
  int64_t row, column;
};

EPIGEMM_HOST_DEVICE Place place_of(uint32_t block, uint32_t blocks_across, uint32_t thread_x, uint32_t thread_y,
                                   uint32_t across, uint32_t down, int width, int rows_of_thread) {
  const uint32_t block_row = block / blocks_across, block_column = block - block_row * blocks_across;
  return {(int64_t(block_row) * down + thread_y) * rows_of_thread, (int64_t(block_column) * across + thread_x) * width};
}

}  // namespace epigemm::cuda
