// The split on a GPU, along rows: one pass over memory. A row's scale depends on all of it, so a row is held on the
// chip between finding its largest element and writing its slices. Across rows: split_strips.cuh.
#include "gemm/fp16_slices/split_rows.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "device/dependent.cuh"
#include "device/launch.h"
#include "device/query.h"
#include "gemm/fp16_slices/slices.h"
#include "gemm/fp16_slices/split_row.cuh"
#include "gemm/fp16_slices/split_strips.cuh"

namespace epigemm::fp16_slices {
namespace {

constexpr int kVector = 4;  // elements a thread handles together: 16 bytes read, 8 bytes of each slice written
constexpr int kMostThreads = 1024;

template <class T, class Combine>
__device__ __forceinline__ T reduce_warp(T value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Combines one value of every thread of the CTA; `neutral` changes nothing. Every thread gets the result.
template <class T, class Combine>
__device__ __forceinline__ T reduce(T value, T neutral, Combine combine) {
  __shared__ T of_warp[kMostThreads / 32];
  value = reduce_warp(value, combine);
  if (blockDim.x == 32) return value;
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_warp(lane < blockDim.x / 32 ? of_warp[lane] : neutral, combine);
}

struct Largest {
  __device__ float operator()(float a, float b) const { return larger(a, b); }
};
// Both counts and the flags of some elements of a row, in one number for warp shuffles.
using Counts = int64_t;
__device__ __forceinline__ Counts counts(int32_t large, int32_t flags, int32_t tiny) {
  return int64_t(tiny) << 32 | large | flags;
}
__device__ __forceinline__ int32_t large_of(Counts counts) { return static_cast<int32_t>(counts) & kLargeMask; }
__device__ __forceinline__ int32_t flags_of(Counts counts) { return static_cast<int32_t>(counts) & ~kLargeMask; }
__device__ __forceinline__ int32_t tiny_of(Counts counts) { return static_cast<int32_t>(counts >> 32); }

// Counts of disjoint elements add up to at most the number of columns.
struct Together {
  __device__ Counts operator()(Counts a, Counts b) const {
    return counts(large_of(a) + large_of(b), flags_of(a) | flags_of(b), tiny_of(a) + tiny_of(b));
  }
};

// Writes the slices of neighbouring elements and returns their share in the row statistics.
__device__ __forceinline__ Counts write_slices(const float (&x)[kVector], int valid, const RowScale& scale, Form form,
                                               __half* row, int column) {
  int32_t large = 0, flags = 0, tiny = 0;
  struct alignas(2 * kVector) {
    __half values[kVector];
  } high, low;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float s = scaled(x[i], scale);
    const Slices<__half> split = split_one(s);
    high.values[i] = split.high;
    low.values[i] = split.low;
    large += i < valid ? large_count(s, scale) : 0;
    flags |= element_flags(x[i]);
    tiny += tiny_count(x[i], s);
  }
  using Vector = decltype(high);
  *reinterpret_cast<Vector*>(row + slice_offset(column, 0, form.slices, form.order)) = high;
  if (form.slices == kSlices) *reinterpret_cast<Vector*>(row + slice_offset(column, 1, form.slices, form.order)) = low;
  return counts(large, flags, tiny);
}

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

// One CTA for each row. Held: the number of vectors that a thread keeps in registers. The rest of longer rows is read
// again, from L2.
template <int Held, bool Vectors>
__global__ void __launch_bounds__(kMostThreads) split_rows_kernel(StridedMatrix matrix, SplitMatrix out, Form form) {
  cuda::let_dependents_start();
  const int64_t r = blockIdx.x;
  const Row<Vectors> row = {matrix.data + r * matrix.row_stride, static_cast<int>(matrix.columns),
                            matrix.column_stride};
  const int first = threadIdx.x * kVector, step = blockDim.x * kVector;
  const int padded = static_cast<int>(out.padded_columns);

  float held[Held][kVector];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < Held; ++i) row.load(first + i * step, held[i]);
#pragma unroll
  for (int i = 0; i < Held; ++i) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) largest = larger(largest, finite_magnitude(held[i][j]));
  }
  for (int column = first + Held * step; column < row.columns; column += step) {
    float x[kVector];
    row.load(column, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) largest = larger(largest, finite_magnitude(x[j]));
  }
  largest = reduce(largest, 0.0f, Largest{});

  const RowScale scale = row_scale(largest);
  auto* const halves = static_cast<__half*>(out.slices) + r * out.padded_columns * form.slices;
  Counts statistics = 0;
#pragma unroll
  for (int i = 0; i < Held; ++i) {
    const int column = first + i * step;
    if (column < padded) {
      statistics = Together{}(statistics, write_slices(held[i], row.valid(column), scale, form, halves, column));
    }
  }
  for (int column = first + Held * step; column < padded; column += step) {
    float x[kVector];
    row.load(column, x);
    statistics = Together{}(statistics, write_slices(x, row.valid(column), scale, form, halves, column));
  }
  statistics = reduce(statistics, Counts{0}, Together{});
  if (threadIdx.x == 0) {
    write_statistics(out, r, largest, large_of(statistics), flags_of(statistics), tiny_of(statistics));
  }
  cuda::wait_for_kernel_ahead();
}

// --- launch --------------------------------------------------------------------------------------------------------

int threads_for(int64_t rows, int64_t padded_columns) {
  // With few rows each row has to be fast: at most two vectors a thread. With many rows eight vectors use the memory
  // better and need fewer reductions.
  constexpr int64_t kFewRows = 264;
  const int64_t vectors = padded_columns / kVector;
  const int64_t wanted = vectors / (rows <= kFewRows ? 2 : 8);
  const int64_t most = rows <= kFewRows ? kMostThreads : 256;
  return static_cast<int>(std::clamp<int64_t>((wanted + 31) / 32 * 32, 32, most));
}

struct Place {
  int device;
  void* stream;
  bool is_beside_kernel_ahead;
};

template <auto Kernel>
const char* enqueue(int64_t blocks, int cluster, int threads, StridedMatrix matrix, SplitMatrix out, Form form,
                    Place place) {
  const cuda::LaunchShape shape{/*grid=*/dim3(static_cast<unsigned>(blocks)),
                                /*block=*/dim3(static_cast<unsigned>(threads)),
                                /*cluster=*/dim3(static_cast<unsigned>(cluster)),
                                /*shared_bytes=*/0,
                                place.device,
                                place.stream,
                                /*dependent=*/place.is_beside_kernel_ahead};
  void* parameters[] = {&matrix, &out, &form};
  return cuda::launch<Kernel>(shape, parameters);
}

template <bool Vectors>
const char* launch_rows(const StridedMatrix& matrix, const SplitMatrix& out, Form form, Place place) {
  const int threads = threads_for(matrix.rows, out.padded_columns);
  const int64_t held = (out.padded_columns + threads * kVector - 1) / (threads * kVector);
  const auto launch = held <= 2 ? &enqueue<&split_rows_kernel<2, Vectors>> : &enqueue<&split_rows_kernel<8, Vectors>>;
  return launch(matrix.rows, /*cluster=*/1, threads, matrix, out, form, place);
}

template <bool Vectors>
const char* launch_strips(const StridedMatrix& matrix, const SplitMatrix& out, Form form, Place place) {
  const Device& device = cuda::device(place.device);
  const strips::Grid grid =
      strips::grid_of(matrix.rows, out.padded_columns, device.capability / 10 == 9, device.multiprocessors);
  const auto launch = grid.row_lanes == 8   ? &enqueue<&strips::split_strips_kernel<8, Vectors>>
                      : grid.row_lanes == 4 ? &enqueue<&strips::split_strips_kernel<4, Vectors>>
                                            : &enqueue<&strips::split_strips_kernel<2, Vectors>>;
  return launch(grid.strips * grid.sharing, grid.sharing, grid.threads, matrix, out, form, place);
}

}  // namespace

const char* split_rows_cuda(const StridedMatrix& matrix, int slices, void* buffer, int device, void* stream,
                            SliceOrder order, bool is_beside_kernel_ahead) {
  if (matrix.rows == 0) return nullptr;
  const SplitMatrix out = split_view(buffer, matrix.rows, matrix.columns, slices, order);
  const Form form{slices, order};
  const Place place{device, stream, is_beside_kernel_ahead};
  const auto are_vectors = [&](int64_t other_stride) {
    return other_stride % kVector == 0 && reinterpret_cast<uintptr_t>(matrix.data) % (kVector * sizeof(float)) == 0;
  };
  if (matrix.row_stride == 1 && matrix.column_stride > 1) {
    const bool vectors = are_vectors(matrix.column_stride) && matrix.rows % kVector == 0;
    return (vectors ? launch_strips<true> : launch_strips<false>)(matrix, out, form, place);
  }
  const bool vectors = matrix.column_stride == 1 && are_vectors(matrix.row_stride);
  return (vectors ? launch_rows<true> : launch_rows<false>)(matrix, out, form, place);
}

}  // namespace epigemm::fp16_slices
