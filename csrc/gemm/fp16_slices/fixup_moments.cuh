// The statistics of results that the fixup has computed again. The GEMM has reduced D in blocks, with the values that
// the fixup replaces. The fixup's tile is a whole number of those blocks, so it reduces them again from D.
#pragma once

#include "gemm/fp16_slices/fixup.h"
#include "gemm/fp16_slices/fp32_tile.cuh"
#include "reduce/moments.h"

namespace epigemm::fp16_slices {

// Null: not wanted. `block`: of D, a divisor of the tile.
struct FixupMoments {
  BlockMoments<float>*of_columns, *of_rows;
  MomentBlock block;
};

// A tile at (m0, n0) in D, which has `rows` x `columns`.
struct TilePlace {
  const float* out;
  int64_t row_stride, m0, n0, rows, columns;
};

// Which parts of a tile's rows have changed: as wide as a thread's results.
struct ChangedParts {
  static constexpr int kParts = fp32_tile::kTileN / fp32_tile::kAcross;
  uint8_t is_changed[fp32_tile::kTileM][kParts];

  // Of the i-th row of this thread.
  __device__ __forceinline__ void set(int i, bool changed) {
    using fp32_tile::ThreadTile;
    is_changed[ThreadTile::row0() + i][ThreadTile::column0() / fp32_tile::kAcross] = changed;
  }

  __device__ __forceinline__ bool any(int row, int first_column, int columns) const {
    bool is_any = false;
    for (int i = 0; i < columns / fp32_tile::kAcross; ++i)
      is_any |= is_changed[row][first_column / fp32_tile::kAcross + i];
    return is_any;
  }
};

__device__ inline BlockMoments<float> moments_of(const float* first, int64_t step, int count) {
  PivotSums<float> sums{pivot_of(*first)};
  for (int i = 0; i < count; ++i) sums.add(first[i * step]);
  return sums.moments(count);
}

// A thread has whole columns of blocks.
__device__ inline void reduce_columns(const FixupMoments& moments, const TilePlace& tile) {
  const int height = moments.block.rows;
  for (int i = threadIdx.x; i < fp32_tile::kTileM / height * fp32_tile::kTileN; i += fp32_tile::kThreads) {
    const int64_t row = tile.m0 + i / fp32_tile::kTileN * height, column = tile.n0 + i % fp32_tile::kTileN;
    if (row >= tile.rows || column >= tile.columns) continue;
    const int count = static_cast<int>(min(int64_t(height), tile.rows - row));
    moments.of_columns[row / height * tile.columns + column] =
        moments_of(tile.out + row * tile.row_stride + column, tile.row_stride, count);
  }
}

// A thread has whole rows of blocks, those with changes alone: a row's statistics do not depend on its neighbours, as
// batch-invariant calls promise.
__device__ inline void reduce_rows(const FixupMoments& moments, const TilePlace& tile, const ChangedParts& changed) {
  const int width = moments.block.columns;
  for (int i = threadIdx.x; i < fp32_tile::kTileN / width * fp32_tile::kTileM; i += fp32_tile::kThreads) {
    const int own_row = i % fp32_tile::kTileM, own_column = i / fp32_tile::kTileM * width;
    const int64_t row = tile.m0 + own_row, column = tile.n0 + own_column;
    if (row >= tile.rows || column >= tile.columns || !changed.any(own_row, own_column, width)) continue;
    const int count = static_cast<int>(min(int64_t(width), tile.columns - column));
    moments.of_rows[column / width * tile.rows + row] = moments_of(tile.out + row * tile.row_stride + column, 1, count);
  }
}

}  // namespace epigemm::fp16_slices
