// The split of a matrix whose rows lie across memory (a transposed one): two passes over it, the second from L2 where
// it can. A cluster takes a strip of rows and finds their largest elements; then it reads the strip again and writes
// its slices. It takes the columns of the second pass from the last to the first: the last ones are still in L2. A
// cluster of as many CTAs as there may be lets few strips be under way at once, so that more of them is.
//
// A thread takes a patch: four rows by eight columns. In every column four rows are 16 bytes, in every row eight
// columns are 16 bytes of hi and as many of lo. So the elements turn round in the registers of a thread, and warps need
// neither shared memory nor barriers on their way.
#pragma once

#include <cooperative_groups.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device/dependent.cuh"
#include "gemm/fp16_slices/slices.h"
#include "gemm/fp16_slices/split_row.cuh"

namespace epigemm::fp16_slices::strips {

constexpr int kPatchRows = 4, kPatchColumns = 8;
constexpr int kMostThreads = 768;
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

// A warp's step is `RowLanes` patches along the strip by as many along the columns as there are lanes left. Vectors:
// the rows of a patch are adjacent and aligned. Otherwise they are RowLanes apart, so that each load has adjacent
// lanes.
template <int RowLanes, bool Vectors>
struct Strip {
  static constexpr int kRows = kPatchRows * RowLanes;
  static constexpr int kStepColumns = kPatchColumns * (32 / RowLanes);

  const float* data;  // of the patch's first row
  int columns;        // 0 for a patch outside the matrix
  int64_t column_stride;
  int rows;                  // of the strip that exist
  int first_row, in_step;    // the patch's first row in the strip; where its slices begin in the columns of a step
  int column_in_step, jump;  // its columns: four from here, and four from `jump` behind it

  __device__ Strip(const StridedMatrix& matrix, int64_t r0, SliceOrder order) {
    const int lane = threadIdx.x % 32, row_lane = lane % RowLanes, column_lane = lane / RowLanes;
    first_row = Vectors ? row_lane * kPatchRows : row_lane;
    rows = static_cast<int>(min(int64_t(kRows), matrix.rows - r0));
    data = matrix.data + r0 + first_row;
    columns = first_row < rows ? static_cast<int>(matrix.columns) : 0;
    column_stride = matrix.column_stride;
    in_step = column_lane * kPatchColumns;
    // slice_offset() of a turned order brings groups of four together that are 16 apart.
    const bool is_turned = order == SliceOrder::Turned;
    column_in_step = is_turned ? column_lane / 4 * 32 + column_lane % 4 * 4 : in_step;
    jump = is_turned ? 16 : 4;
  }

  __device__ __forceinline__ int row(int i) const { return first_row + (Vectors ? i : i * RowLanes); }
  __device__ __forceinline__ bool is_there() const { return columns > 0; }
  // Of a patch that is there. Vectors are chosen where all patches are whole.
  __device__ __forceinline__ bool has(int i) const { return Vectors || row(i) < rows; }

  __device__ __forceinline__ void load(int step, float (&x)[kPatchColumns][kPatchRows]) const {
    const int first = step * kStepColumns + column_in_step;
    const float* from = data + first * column_stride;
#pragma unroll
    for (int c = 0; c < kPatchColumns; ++c) {
      const int column = first + c / 4 * jump + c % 4;
      if constexpr (Vectors) {
        const float4 loaded =
            column < columns ? *reinterpret_cast<const float4*>(from) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        x[c][0] = loaded.x, x[c][1] = loaded.y, x[c][2] = loaded.z, x[c][3] = loaded.w;
      } else {
#pragma unroll
        for (int i = 0; i < kPatchRows; ++i) x[c][i] = column < columns && has(i) ? from[i * RowLanes] : 0.0f;
      }
      from += c == 3 ? (jump - 3) * column_stride : column_stride;
    }
  }

  // Of the patch, those that have the same rows in other lanes: combines a value of each.
  template <class T, class Combine>
  __device__ __forceinline__ T across_columns(T value, Combine combine) const {
#pragma unroll
    for (int distance = RowLanes; distance < 32; distance *= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
  }
};

// What a CTA finds of its rows.
template <int Rows>
struct Found {
  uint32_t largest[Rows];  // the bits of the largest finite magnitude: they are ordered as the numbers are
  int32_t large[Rows], flags[Rows], tiny[Rows];

  __device__ void clear(int row) { largest[row] = large[row] = flags[row] = tiny[row] = 0; }
};

// Takes a patch's elements into its rows' largest. Numbers that are not finite are rare: their magnitudes' bits are
// above all others, and only then it looks at each.
template <class Strip>
__device__ __forceinline__ void note(const Strip& strip, const float (&x)[kPatchColumns][kPatchRows],
                                     uint32_t (&largest)[kPatchRows], int32_t* flags_of_row) {
  constexpr uint32_t kInfinity = 0x7f800000u;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < kPatchColumns; ++c) most = max(most, bit_cast<uint32_t>(magnitude(x[c][i])));
    if (most >= kInfinity) {
      int32_t flags = 0;
      most = 0;
#pragma unroll
      for (int c = 0; c < kPatchColumns; ++c) {
        flags |= element_flags(x[c][i]);
        most = max(most, bit_cast<uint32_t>(finite_magnitude(x[c][i])));
      }
      atomicOr(&flags_of_row[strip.row(i)], flags);
    }
    largest[i] = max(largest[i], most);
  }
}

struct alignas(16) EightHalves {
  __half2 pairs[kPatchColumns / 2];

  __device__ __forceinline__ void write(__half* to) const { *reinterpret_cast<uint4*>(to) = bit_cast<uint4>(*this); }
};

// Writes the slices of a patch's row, and counts. Columns of padding are zeros, which count for nothing.
__device__ __forceinline__ void write_patch_row(const float (&x)[kPatchColumns], RowScale scale, int slices, __half* to,
                                                int32_t& large, int32_t& tiny) {
  EightHalves high, low;
#pragma unroll
  for (int p = 0; p < kPatchColumns / 2; ++p) {
    const float s[2] = {scaled(x[2 * p], scale), scaled(x[2 * p + 1], scale)};
    const Slices<__half> first = split_one(s[0]), second = split_one(s[1]);
    high.pairs[p] = __halves2half2(first.high, second.high), low.pairs[p] = __halves2half2(first.low, second.low);
#pragma unroll
    for (int i = 0; i < 2; ++i) large += large_count(s[i], scale), tiny += tiny_count(x[2 * p + i], s[i]);
  }
  high.write(to);
  if (slices == kSlices) low.write(to + kInterleave);
}

// 64 registers a thread: two CTAs of half the most threads on a multiprocessor, or one of all.
template <int RowLanes, bool Vectors>
__global__ void __launch_bounds__(kMostThreads) split_strips_kernel(StridedMatrix matrix, SplitMatrix out, Form form) {
  cuda::let_dependents_start();
  using Strip = Strip<RowLanes, Vectors>;
  constexpr int kRows = Strip::kRows;
  __shared__ Found<kRows> found;
  __shared__ RowScale scales[kRows];
  __shared__ float largest_of_all[kRows];
  const Sharing sharing;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t r0 = int64_t(blockIdx.x / sharing.count()) * kRows;
  const Strip strip(matrix, r0, form.order);
  const int padded = static_cast<int>(out.padded_columns);
  const int steps = (padded + Strip::kStepColumns - 1) / Strip::kStepColumns;
  const int share = (steps + sharing.count() - 1) / sharing.count();
  const int first = sharing.rank() * share + warp, end = min((sharing.rank() + 1) * share, steps);

  if (threadIdx.x < kRows) found.clear(threadIdx.x);
  __syncthreads();
  float x[kPatchColumns][kPatchRows];
  uint32_t largest[kPatchRows] = {};
  int step = first;
  for (; step < end; step += warps) {
    strip.load(step, x);
    note(strip, x, largest, found.flags);
  }
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    largest[i] = strip.across_columns(largest[i], [](uint32_t a, uint32_t b) { return max(a, b); });
    if (strip.in_step == 0) atomicMax(&found.largest[strip.row(i)], largest[i]);
  }
  sharing.sync();

  if (threadIdx.x < kRows) {
    uint32_t most = 0;
#pragma unroll
    for (int rank = 0; rank < kMostSharing; ++rank) {
      if (rank < sharing.count()) most = max(most, sharing.of(found.largest[threadIdx.x], rank));
    }
    largest_of_all[threadIdx.x] = bit_cast<float>(most);
    scales[threadIdx.x] = row_scale(bit_cast<float>(most));
  }
  __syncthreads();

  const int64_t row_halves = out.padded_columns * form.slices, row_step = row_halves * (strip.row(1) - strip.row(0));
  __half* const slices = static_cast<__half*>(out.slices) + (r0 + strip.row(0)) * row_halves;
  int32_t large[kPatchRows] = {}, tiny[kPatchRows] = {};
  for (step -= warps; step >= first; step -= warps) {
    strip.load(step, x);
    const int position = step * Strip::kStepColumns + strip.in_step;
    if (position >= padded || !strip.is_there()) continue;
    __half* to = slices + slice_offset(position, 0, form.slices);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i, to += row_step) {
      if (!strip.has(i)) continue;
      const float of_row[kPatchColumns] = {x[0][i], x[1][i], x[2][i], x[3][i], x[4][i], x[5][i], x[6][i], x[7][i]};
      write_patch_row(of_row, scales[strip.row(i)], form.slices, to, large[i], tiny[i]);
    }
  }

#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    const auto add = [](int32_t a, int32_t b) { return a + b; };
    large[i] = strip.across_columns(large[i], add), tiny[i] = strip.across_columns(tiny[i], add);
    if (strip.in_step == 0) {
      atomicAdd(&found.large[strip.row(i)], large[i]);
      atomicAdd(&found.tiny[strip.row(i)], tiny[i]);
    }
  }
  sharing.sync();
  if (sharing.rank() == 0 && threadIdx.x < strip.rows) {
    const int row = threadIdx.x;
    int32_t all_large = 0, all_flags = 0, all_tiny = 0;
    for (int rank = 0; rank < sharing.count(); ++rank) {
      all_large += sharing.of(found.large[row], rank);
      all_flags |= sharing.of(found.flags[row], rank);
      all_tiny += sharing.of(found.tiny[row], rank);
    }
    write_statistics(out, r0 + row, largest_of_all[row], all_large, all_flags, all_tiny);
  }
  sharing.sync();  // a CTA's shared memory must exist until the first CTA has read it
  cuda::wait_for_kernel_ahead();
}

// How the matrix is taken apart.
struct Grid {
  int row_lanes;  // 8, 4 or 2: strips of 32, 16 or 8 rows
  int64_t strips;
  int sharing, threads;
};

// Few rows make narrow strips, so that there are CTAs for half of the multiprocessors: 262144 x 256 take 260 us in wide
// strips, 328 in twice as many (an H200). One CTA a strip where there are no
// clusters: other GPUs than Hopper run the code for sm_80.
inline Grid grid_of(int64_t rows, int64_t padded_columns, bool has_clusters, int multiprocessors) {
  constexpr int kFewestWarps = 4;
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int most = has_clusters ? kMostSharing : 1;
  Grid grid{/*row_lanes=*/8, 0, /*sharing=*/1, 0};
  while (grid.row_lanes > 2 && 5 * most * up(rows, kPatchRows * grid.row_lanes) < 2 * multiprocessors) {
    grid.row_lanes /= 2;
  }
  grid.strips = up(rows, kPatchRows * grid.row_lanes);
  const int64_t steps = up(padded_columns, kPatchColumns * (32 / grid.row_lanes));
  while (grid.sharing < most && steps >= 2 * grid.sharing * kFewestWarps) grid.sharing *= 2;
  // One CTA a multiprocessor needs all of its loads in flight.
  const int64_t most_warps = grid.strips * grid.sharing <= multiprocessors ? kMostThreads / 32 : kMostThreads / 64;
  grid.threads = 32 * static_cast<int>(std::clamp<int64_t>(up(steps, grid.sharing), 1, most_warps));
  return grid;
}

}  // namespace epigemm::fp16_slices::strips
