// The split on a GPU: one pass over memory. A row's scale depends on all of it, so a row is held on the chip between
// finding its largest element and writing its slices.
#include "gemm/sm90_fp16x3/split_rows.h"

#include <algorithm>

#include "device/launch.h"
#include "gemm/sm90_fp16x3/split_strips.cuh"

namespace epigemm::sm90_fp16x3 {
namespace {

constexpr int kVector = 4;  // elements a thread handles together: 16 bytes read, 8 bytes of each slice written

// --- rows along memory (or with any strides) -----------------------------------------------------------------------

// Columns fit 32 bits (kMostColumns).
template <bool Vectors>
struct Row {
  const float* data;
  int columns;
  int64_t column_stride;

  __device__ __forceinline__ int valid(int column) const { return max(0, min(kVector, columns - column)); }

  __device__ __forceinline__ void load(int column, float (&x)[kVector]) const {
    if (Vectors && column + kVector <= columns) {
      const float4 loaded = *reinterpret_cast<const float4*>(data + column);
      x[0] = loaded.x, x[1] = loaded.y, x[2] = loaded.z, x[3] = loaded.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = column + i < columns ? data[(column + i) * column_stride] : 0.0f;
  }
};

// Empty from row `end` on.
template <bool Vectors>
__device__ __forceinline__ Row<Vectors> row_of(const StridedMatrix& matrix, int64_t row, int64_t end) {
  return Row<Vectors>{matrix.data + row * matrix.row_stride, row < end ? static_cast<int>(matrix.columns) : 0,
                      matrix.column_stride};
}

// Who splits a row, and whether all of it is held.
struct OneCta {
  static constexpr bool kHoldsAll = false;
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int threads() { return static_cast<int>(blockDim.x); }
  template <class T, class Combine>
  static __device__ T together(T value, T neutral, Combine combine) {
    return reduce(value, neutral, combine);
  }
};
struct OneWarp {
  static constexpr bool kHoldsAll = true;
  static __device__ int thread() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ constexpr int threads() { return 32; }
  template <class T, class Combine>
  static __device__ T together(T value, T, Combine combine) {
    return reduce_warp(value, combine);
  }
};

// Splits `Rows` rows at once, those of them that are before `end`. Held: how many vectors of a row a thread keeps in
// registers; longer rows are read again, from L2. Returns the statistics in the first thread.
template <class Team, int Rows, int Held, bool Vectors>
__device__ __forceinline__ RangeStatistics split_rows_at(int64_t first_row, int64_t end, const StridedMatrix& matrix,
                                                         const SplitMatrix& out, int slices) {
  const int first = Team::thread() * kVector, step = Team::threads() * kVector;
  const int padded = static_cast<int>(out.padded_columns);
  Row<Vectors> rows[Rows];
  float held[Rows][Held][kVector], largest[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    rows[r] = row_of<Vectors>(matrix, first_row + r, end);
#pragma unroll
    for (int i = 0; i < Held; ++i) rows[r].load(first + i * step, held[r][i]);
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    largest[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < Held; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) largest[r] = larger(largest[r], finite_magnitude(held[r][i][j]));
    }
    for (int column = first + Held * step; !Team::kHoldsAll && column < rows[r].columns; column += step) {
      float x[kVector];
      rows[r].load(column, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) largest[r] = larger(largest[r], finite_magnitude(x[j]));
    }
    largest[r] = Team::together(largest[r], 0.0f, Largest{});
  }
  RangeStatistics all;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    if (first_row + r >= end) break;
    const RowScale scale = row_scale(largest[r]);
    auto* const halves = static_cast<__half*>(out.slices) + (first_row + r) * out.padded_columns * slices;
    Counts found = 0;
#pragma unroll
    for (int i = 0; i < Held; ++i) {
      const int column = first + i * step;
      if (column < padded) {
        found = Together{}(found, write_slices(held[r][i], rows[r].valid(column), scale, slices, halves, column));
      }
    }
    for (int column = first + Held * step; !Team::kHoldsAll && column < padded; column += step) {
      float x[kVector];
      rows[r].load(column, x);
      found = Together{}(found, write_slices(x, rows[r].valid(column), scale, slices, halves, column));
    }
    found = Team::together(found, Counts{0}, Together{});
    if (Team::thread() == 0) {
      all = combine(all, range_statistics(write_statistics(out, first_row + r, largest[r], found)));
    }
  }
  return all;
}

// A team takes a group of rows, and writes its summary.
template <class Team, int Rows, int Held, bool Vectors>
__device__ __forceinline__ void split_group(int64_t group, const StridedMatrix& matrix, const SplitMatrix& out,
                                            int slices) {
  const int of_group = rows_of_group(matrix.rows);
  const int64_t end = min((group + 1) * of_group, matrix.rows);
  RangeStatistics all;
  for (int64_t row = group * of_group; row < end; row += Rows) {
    all = combine(all, split_rows_at<Team, Rows, Held, Vectors>(row, end, matrix, out, slices));
  }
  if (Team::thread() == 0) out.summaries[group] = summary(all);
}

// So many threads have the registers for so many vectors.
constexpr int most_threads(int held) { return held <= 2 ? kMostThreads : kMostThreads / 2; }

template <int Held, bool Vectors>
__global__ void __launch_bounds__(most_threads(Held))
    split_by_ctas_kernel(StridedMatrix matrix, SplitMatrix out, int slices) {
  cuda::let_dependents_start();
  split_group<OneCta, /*Rows=*/1, Held, Vectors>(blockIdx.x, matrix, out, slices);
}

// Short rows: a warp holds several, so that enough bytes are on their way.
constexpr int kWarps = 4, kMostHeldByWarp = 8;
constexpr int rows_at_once(int held) { return held >= 4 ? 1 : 4 / held; }

template <int Held, bool Vectors>
__global__ void __launch_bounds__(32 * kWarps, 4)
    split_by_warps_kernel(StridedMatrix matrix, SplitMatrix out, int slices) {
  cuda::let_dependents_start();
  const int64_t group = blockIdx.x * int64_t(kWarps) + threadIdx.x / 32;
  if (group >= groups_of(matrix.rows)) return;
  split_group<OneWarp, rows_at_once(Held), Held, Vectors>(group, matrix, out, slices);
}

// --- launch --------------------------------------------------------------------------------------------------------

constexpr int64_t kFewRows = 264;  // each must be fast by itself

int threads_for(int64_t rows, int64_t padded_columns) {
  // With few rows at most two vectors a thread. With many, eight keep the memory busier and the reductions fewer.
  const int64_t vectors = padded_columns / kVector;
  const int64_t wanted = vectors / (rows <= kFewRows ? 2 : 8);
  const int64_t most = rows <= kFewRows ? kMostThreads : 256;
  return static_cast<int>(std::clamp<int64_t>((wanted + 31) / 32 * 32, 32, most));
}

struct Place {
  int device;
  void* stream;
};

template <auto Kernel>
const char* enqueue(int64_t blocks, int cluster, int threads, StridedMatrix matrix, SplitMatrix out, int slices,
                    Place place) {
  const cuda::LaunchShape shape{/*grid=*/dim3(static_cast<unsigned>(blocks)),
                                /*block=*/dim3(static_cast<unsigned>(threads)),
                                /*cluster=*/dim3(static_cast<unsigned>(cluster)),
                                /*shared_bytes=*/0,
                                place.device,
                                place.stream,
                                /*dependent=*/false};
  void* parameters[] = {&matrix, &out, &slices};
  return cuda::launch<Kernel>(shape, parameters);
}

template <bool Vectors>
const char* launch_warps(const StridedMatrix& matrix, const SplitMatrix& out, int slices, Place place) {
  const int64_t held = (out.padded_columns + 32 * kVector - 1) / (32 * kVector);
  const auto launch = held <= 1   ? &enqueue<&split_by_warps_kernel<1, Vectors>>
                      : held <= 2 ? &enqueue<&split_by_warps_kernel<2, Vectors>>
                      : held <= 4 ? &enqueue<&split_by_warps_kernel<4, Vectors>>
                                  : &enqueue<&split_by_warps_kernel<8, Vectors>>;
  const int64_t ctas = (groups_of(matrix.rows) + kWarps - 1) / kWarps;
  return launch(ctas, /*cluster=*/1, 32 * kWarps, matrix, out, slices, place);
}

template <bool Vectors>
const char* launch_rows(const StridedMatrix& matrix, const SplitMatrix& out, int slices, Place place) {
  if (matrix.rows > kFewRows && out.padded_columns <= 32 * kVector * kMostHeldByWarp) {
    return launch_warps<Vectors>(matrix, out, slices, place);
  }
  const int threads = threads_for(matrix.rows, out.padded_columns);
  if (out.padded_columns <= 2 * threads * kVector) {
    return enqueue<&split_by_ctas_kernel<2, Vectors>>(groups_of(matrix.rows), /*cluster=*/1, threads, matrix, out,
                                                      slices, place);
  }
  return enqueue<&split_by_ctas_kernel<8, Vectors>>(groups_of(matrix.rows), /*cluster=*/1,
                                                    std::min(threads, most_threads(8)), matrix, out, slices, place);
}

}  // namespace

const char* split_rows_cuda(const StridedMatrix& matrix, int slices, void* buffer, int device, void* stream) {
  if (matrix.rows == 0) return nullptr;
  const SplitMatrix out = split_view(buffer, matrix.rows, matrix.columns, slices);
  const Place place{device, stream};
  if (matrix.row_stride == 1 && matrix.column_stride > 1) {
    const int64_t strips = (matrix.rows + kStrip - 1) / kStrip;
    const int sharing = ctas_sharing(strips, out.padded_columns);
    return enqueue<&split_strips_kernel>(strips * sharing, sharing, kStripThreads, matrix, out, slices, place);
  }
  const bool vectors = matrix.column_stride == 1 && matrix.row_stride % kVector == 0 &&
                       reinterpret_cast<uintptr_t>(matrix.data) % (kVector * sizeof(float)) == 0;
  return (vectors ? launch_rows<true> : launch_rows<false>)(matrix, out, slices, place);
}

}  // namespace epigemm::sm90_fp16x3
