// The split of rows that lie across memory, of a transposed matrix.
#pragma once

#include <cooperative_groups.h>

#include "gemm/sm90_fp16x3/split_row.cuh"

namespace epigemm::sm90_fp16x3 {

constexpr int kStrip = 32;  // rows a cluster takes: 128 adjacent bytes at every column
constexpr int kStripThreads = 512;
constexpr int kStripWarps = kStripThreads / 32;
constexpr int kRowsOfWarp = kStrip / kStripWarps;
constexpr int kColumnsOfWarp = kInterleave / kStripWarps;
constexpr int kMostSharing = 8;  // CTAs of a cluster: the portable limit

// The CTAs that share a strip: each takes a part of its columns.
struct Sharing {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  __device__ int rank() const { return static_cast<int>(cluster.block_rank()); }
  __device__ int count() const { return static_cast<int>(cluster.num_blocks()); }
  __device__ void sync() const { cluster.sync(); }
  template <class T>
  __device__ const T& of(const T& shared, int rank) const {
    return *cluster.map_shared_rank(&shared, rank);
  }
#else
  __device__ int rank() const { return 0; }
  __device__ int count() const { return 1; }
  __device__ void sync() const { __syncthreads(); }
  template <class T>
  __device__ const T& of(const T& shared, int) const {
    return shared;
  }
#endif
};

// A strip of rows is read twice: coalesced along the strip for the largest elements, then in blocks of 64 columns that
// turn round in shared memory. Few rows make few strips, so a cluster shares one: a CTA by itself would take 40 us for
// a weight of 768 x 3072, which is as long as the product (H200).
static __global__ void __launch_bounds__(kStripThreads)
    split_strips_kernel(StridedMatrix matrix, SplitMatrix out, int slices) {
  cuda::let_dependents_start();
  __shared__ float block[kInterleave][kStrip + 1];  // + 1: columns of it are read without bank conflicts
  __shared__ float largest_of_warp[kStripWarps][kStrip];
  __shared__ float largest_of_row[kStrip];
  __shared__ Counts statistics_of_row[kStrip];
  const Sharing sharing;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t r0 = int64_t(blockIdx.x / sharing.count()) * kStrip;
  const bool inside = r0 + lane < matrix.rows;
  const float* const data = matrix.data + (r0 + lane) * matrix.row_stride;
  const auto load = [&](int64_t column) {
    return inside && column < matrix.columns ? data[column * matrix.column_stride] : 0.0f;
  };

  const int64_t blocks = (out.padded_columns + kInterleave - 1) / kInterleave;
  const int64_t share = (blocks + sharing.count() - 1) / sharing.count();
  const int64_t first = min(sharing.rank() * share, blocks), end = min(first + share, blocks);

  float largest = 0.0f;
#pragma unroll 8
  for (int64_t column = first * kInterleave + warp; column < end * kInterleave; column += kStripWarps) {
    largest = larger(largest, finite_magnitude(load(column)));
  }
  largest_of_warp[warp][lane] = largest;
  __syncthreads();
  if (warp == 0) {
    for (int other = 1; other < kStripWarps; ++other) largest = larger(largest, largest_of_warp[other][lane]);
    largest_of_row[lane] = largest;
  }
  sharing.sync();

  float row_largest[kRowsOfWarp];
  Counts statistics[kRowsOfWarp] = {};
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const float mine = lane < sharing.count() ? sharing.of(largest_of_row[warp * kRowsOfWarp + i], lane) : 0.0f;
    row_largest[i] = reduce_warp(mine, Largest{});
  }

  float next[kColumnsOfWarp];  // loaded while the block ahead is written
  const auto load_block = [&](int64_t b) {
#pragma unroll
    for (int i = 0; i < kColumnsOfWarp; ++i) next[i] = load(b * kInterleave + i * kStripWarps + warp);
  };
  load_block(first);
  for (int64_t b = first; b < end; ++b) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumnsOfWarp; ++i) block[i * kStripWarps + warp][lane] = next[i];
    __syncthreads();
    if (b + 1 < end) load_block(b + 1);
    const int64_t column = b * kInterleave + 2 * lane;
    const int valid = static_cast<int>(max(int64_t(0), min(int64_t(2), matrix.columns - column)));
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int64_t row = r0 + warp * kRowsOfWarp + i;
      if (row >= matrix.rows || column >= out.padded_columns) continue;
      const float x[2] = {block[2 * lane][warp * kRowsOfWarp + i], block[2 * lane + 1][warp * kRowsOfWarp + i]};
      auto* const halves = static_cast<__half*>(out.slices) + row * out.padded_columns * slices;
      statistics[i] =
          Together{}(statistics[i], write_slices(x, valid, row_scale(row_largest[i]), slices, halves, column));
    }
  }

#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    statistics[i] = reduce_warp(statistics[i], Together{});
    if (lane == 0) statistics_of_row[warp * kRowsOfWarp + i] = statistics[i];
  }
  sharing.sync();
  if (sharing.rank() == 0) {
    __shared__ Summary summary_of_row[kStrip];
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int row = warp * kRowsOfWarp + i;
      const Counts mine = lane < sharing.count() ? sharing.of(statistics_of_row[row], lane) : 0;
      const Counts all = reduce_warp(mine, Together{});
      if (lane != 0) continue;
      RangeStatistics of_row;
      if (r0 + row < matrix.rows) of_row = range_statistics(write_statistics(out, r0 + row, row_largest[i], all));
      summary_of_row[row] = summary(of_row);
    }
    __syncthreads();
    if (warp == 0) {
      const int of_group = rows_of_group(matrix.rows);
      const RangeStatistics all = across_lanes(range_statistics(summary_of_row[lane]), of_group - 1);
      if (inside && lane % of_group == 0) out.summaries[(r0 + lane) / of_group] = summary(all);
    }
  }
  sharing.sync();  // a CTA's shared memory stays until the first one has read it
}

// As many CTAs for a strip as fill the GPU twice, and as each has two blocks of columns for.
inline int ctas_sharing(int64_t strips, int64_t padded_columns) {
  constexpr int64_t kManyCtas = 264;
  const int64_t blocks = (padded_columns + kInterleave - 1) / kInterleave;
  int ctas = 1;
  while (ctas < kMostSharing && strips * ctas < kManyCtas && blocks >= 4 * ctas) ctas *= 2;
  return ctas;
}

}  // namespace epigemm::sm90_fp16x3
