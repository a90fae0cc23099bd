// The statistics of results that the fixup has computed again. The GEMM has reduced D in blocks, with the values that
// the fixup replaces. The fixup's tile is a whole number of those blocks, so it reduces them again from D.
#pragma once

#include "gemm/fp16_slices/fixup.h"
#include "gemm/fp16_slices/fp32_tile.cuh"
#include "reduce/moments.h"

namespace epigemm::fp16_slices {

struct FixupMoments {
  BlockMoments<float>* of_columns;  // null: not wanted
  int block_rows;                   // a divisor of the tile's
};

// A tile at (m0, n0) in D, which has `rows` x `columns`.
struct TilePlace {
  const float* out;
  int64_t row_stride, m0, n0, rows, columns;
};

// A thread has whole columns of blocks.
__device__ inline void reduce_columns(const FixupMoments& moments, const TilePlace& tile) {
  const int height = moments.block_rows;
  for (int i = threadIdx.x; i < fp32_tile::kTileM / height * fp32_tile::kTileN; i += fp32_tile::kThreads) {
    const int64_t row = tile.m0 + i / fp32_tile::kTileN * height, column = tile.n0 + i % fp32_tile::kTileN;
    if (row >= tile.rows || column >= tile.columns) continue;
    const int count = static_cast<int>(min(int64_t(height), tile.rows - row));
    const float* const first = tile.out + row * tile.row_stride + column;
    PivotSums<float> sums{pivot_of(*first)};
    for (int j = 0; j < count; ++j) sums.add(first[j * tile.row_stride]);
    moments.of_columns[row / height * tile.columns + column] = sums.moments(count);
  }
}

}  // namespace epigemm::fp16_slices
