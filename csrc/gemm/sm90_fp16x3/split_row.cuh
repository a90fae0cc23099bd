// What the kernels that split rows share: reductions, and what is written of a row.
#pragma once

#include <cuda_fp16.h>

#include "device/dependent.cuh"
#include "gemm/sm90_fp16x3/range_check.h"

namespace epigemm::sm90_fp16x3 {

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

__device__ __forceinline__ float larger(float a, float b) { return a < b ? b : a; }

struct Largest {
  __device__ float operator()(float a, float b) const { return larger(a, b); }
};

// Both counts and the flags of some elements of a row, as one number that shuffles can carry.
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

// Returns the row's statistics.
__device__ __forceinline__ int32_t write_statistics(const SplitMatrix& out, int64_t row, float largest, Counts counts) {
  const int32_t statistics =
      row_statistics(large_of(counts), flags_of(counts), tiny_of(counts), row_scale(largest), out.columns);
  out.roots[row] = row_root(row_exponent(largest));
  out.tiny[row] = tiny_of(counts);
  out.statistics[row] = statistics;
  return statistics;
}

// Writes the slices of neighbouring elements and returns their share in the row statistics.
template <int Count>
__device__ __forceinline__ Counts write_slices(const float (&x)[Count], int valid, const RowScale& scale, int slices,
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
  *reinterpret_cast<Vector*>(row + slice_offset(column, 0, slices)) = high;
  if (slices == kSlices) *reinterpret_cast<Vector*>(row + slice_offset(column, 1, slices)) = low;
  return counts(large, flags, tiny);
}

}  // namespace epigemm::sm90_fp16x3
