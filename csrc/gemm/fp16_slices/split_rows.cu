// The split on a GPU: one pass over memory. A row's scale depends on all of it, so a row is held on the chip between
// finding its largest element and writing its slices.
#include "gemm/fp16_slices/split_rows.h"

#include <cooperative_groups.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device/dependent.cuh"
#include "device/launch.h"
#include "device/query.h"
#include "gemm/fp16_slices/slices.h"

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

__device__ __forceinline__ Slices<__half> split_one(float s) {
  return split_element<__half>(s, [](float x) { return __float2half_rn(x); }, [](__half x) { return __half2float(x); });
}

__device__ __forceinline__ void write_statistics(const SplitMatrix& out, int64_t row, float largest, Counts counts) {
  out.roots[row] = row_root(row_exponent(largest));
  out.tiny[row] = tiny_of(counts);
  out.statistics[row] =
      row_statistics(large_of(counts), flags_of(counts), tiny_of(counts), row_scale(largest), out.columns);
}

// The slices that are wanted.
struct Form {
  int slices;
  SliceOrder order;
};

// Writes the slices of neighbouring elements, two or four, and returns their share in the row statistics.
template <int Count>
__device__ __forceinline__ Counts write_slices(const float (&x)[Count], int valid, const RowScale& scale, Form form,
                                               __half* row, int column) {
  int32_t large = 0, flags = 0, tiny = 0;
  struct alignas(2 * Count) {
    __half values[Count];
  } high, low;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
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
  if (threadIdx.x == 0) write_statistics(out, r, largest, statistics);
  cuda::wait_for_kernel_ahead();
}

// --- rows across memory (a transposed matrix) ----------------------------------------------------------------------

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
__global__ void __launch_bounds__(kStripThreads) split_strips_kernel(StridedMatrix matrix, SplitMatrix out, Form form) {
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

  float next[kColumnsOfWarp];  // loaded while the previous block is written
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
      auto* const halves = static_cast<__half*>(out.slices) + row * out.padded_columns * form.slices;
      statistics[i] =
          Together{}(statistics[i], write_slices(x, valid, row_scale(row_largest[i]), form, halves, column));
    }
  }

#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    statistics[i] = reduce_warp(statistics[i], Together{});
    if (lane == 0) statistics_of_row[warp * kRowsOfWarp + i] = statistics[i];
  }
  sharing.sync();
  if (sharing.rank() == 0) {
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int64_t row = r0 + warp * kRowsOfWarp + i;
      const Counts mine = lane < sharing.count() ? sharing.of(statistics_of_row[warp * kRowsOfWarp + i], lane) : 0;
      const Counts all = reduce_warp(mine, Together{});
      if (lane == 0 && row < matrix.rows) write_statistics(out, row, row_largest[i], all);
    }
  }
  sharing.sync();  // a CTA's shared memory must exist until the first CTA has read it
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

// The number of CTAs for a strip: enough to fill the GPU twice, but each with two blocks of columns at least. One where
// there are no clusters: other GPUs than Hopper run the code for sm_80.
int ctas_sharing(int64_t strips, int64_t padded_columns, int device) {
  constexpr int64_t kManyCtas = 264;
  if (cuda::device(device).capability / 10 != 9) return 1;
  const int64_t blocks = (padded_columns + kInterleave - 1) / kInterleave;
  int ctas = 1;
  while (ctas < kMostSharing && strips * ctas < kManyCtas && blocks >= 4 * ctas) ctas *= 2;
  return ctas;
}

}  // namespace

const char* split_rows_cuda(const StridedMatrix& matrix, int slices, void* buffer, int device, void* stream,
                            SliceOrder order, bool is_beside_kernel_ahead) {
  if (matrix.rows == 0) return nullptr;
  const SplitMatrix out = split_view(buffer, matrix.rows, matrix.columns, slices, order);
  const Form form{slices, order};
  const Place place{device, stream, is_beside_kernel_ahead};
  if (matrix.row_stride == 1 && matrix.column_stride > 1) {
    const int64_t strips = (matrix.rows + kStrip - 1) / kStrip;
    const int sharing = ctas_sharing(strips, out.padded_columns, device);
    return enqueue<&split_strips_kernel>(strips * sharing, sharing, kStripThreads, matrix, out, form, place);
  }
  const bool vectors = matrix.column_stride == 1 && matrix.row_stride % kVector == 0 &&
                       reinterpret_cast<uintptr_t>(matrix.data) % (kVector * sizeof(float)) == 0;
  return (vectors ? launch_rows<true> : launch_rows<false>)(matrix, out, form, place);
}

}  // namespace epigemm::fp16_slices
