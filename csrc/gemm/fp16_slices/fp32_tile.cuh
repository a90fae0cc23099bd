// One tile of an fp32 product in plain fp32 multiply-adds: what the range check rejects is recomputed so.
//
// Three bf16 slices and six products were tried first. They are no faster in a kernel of this size, and do not cover
// fp32's range: a row that spans more than 2^160, or a subnormal that meets a large number, loses bits whatever the
// scale. Multiply-adds lose nothing, and infinities and NaN come out as SGEMM's.
#pragma once

#include "gemm/fp16_slices/layout.h"
#include "gemm/fp16_slices/slices.h"

namespace epigemm::fp16_slices::fp32_tile {

constexpr int kTileM = 128, kTileN = 64, kChunk = 16;  // of x's rows, of the weight's rows, of K
constexpr int kThreads = 256;
constexpr int kDown = 8, kAcross = 4;  // results of one thread
constexpr int kThreadsAcross = kTileN / kAcross;
constexpr int kChunksPerPartialSum = 4;
constexpr int kPartialSum = kChunk * kChunksPerPartialSum;  // of K

// Chunks that are being loaded at once: with one tile a CTA, latency is the limit.
constexpr int kStages = 3;

// Columns of a chunk are rows here; the padding keeps transposing copies off each other's banks.
template <int Rows>
struct Chunk {
  alignas(16) float elements[kChunk][Rows + 4];
};

struct Shared {
  Chunk<kTileM> x[kStages];
  Chunk<kTileN> weight[kStages];
};

// Copies an element without waiting for it, or a zero. (__pipeline_memcpy_async would branch over `exists`.)
__device__ __forceinline__ void copy_async(float* to, const float* from, bool exists) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes_read = exists ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes_read) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all copies except those of the latest groups.
template <int Latest>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Latest) : "memory");
}

// Copies columns [k, k + kChunk) of `Rows` rows. Neighbouring threads copy neighbouring elements, along rows or across
// them as the matrix lies. Every copy of a warp takes whole sectors: rows 2^n bytes apart share sets of the L1 cache,
// and half a sector would be gone before the next copy asks for its rest.
template <int Rows>
__device__ __forceinline__ void copy_chunk(const StridedMatrix& matrix, int64_t first_row, int64_t k,
                                           Chunk<Rows>& chunk) {
  constexpr int kRowStep = kThreads / kChunk;
  static_assert(kRowStep == kChunk);  // so that rows and columns of the threads can change places
  const int slow = static_cast<int>(threadIdx.x) / kChunk, fast = static_cast<int>(threadIdx.x) % kChunk;
  const bool is_transposed = matrix.row_stride < matrix.column_stride;
  const int row = is_transposed ? fast : slow, column = is_transposed ? slow : fast;
  const float* from = matrix.data + (first_row + row) * matrix.row_stride + (k + column) * matrix.column_stride;
  // Rows of the matrix from this thread's first one on; what is outside of it becomes zero, and is not read.
  const int rows =
      k + column < matrix.columns ? static_cast<int>(min(matrix.rows - first_row - row, int64_t(Rows))) : 0;
#pragma unroll
  for (int i = 0; i < Rows; i += kRowStep, from += kRowStep * matrix.row_stride) {
    copy_async(&chunk.elements[column][row + i], from, i < rows);
  }
}

struct ThreadTile {
  float sums[kDown][kAcross] = {};

  static __device__ int row0() { return static_cast<int>(threadIdx.x) / kThreadsAcross * kDown; }
  static __device__ int column0() { return static_cast<int>(threadIdx.x) % kThreadsAcross * kAcross; }
};

// How the elements of this thread's rows are changed before they are multiplied: not at all,
struct Elements {
  __device__ __forceinline__ float of_x(float element, int) const { return element; }
  __device__ __forceinline__ float of_weight(float element, int) const { return element; }
};

// or to magnitudes, in the scale of their row's slices.
struct ScaledMagnitudes {
  float x_scales[kDown], weight_scales[kAcross];
  __device__ __forceinline__ float of_x(float element, int i) const { return magnitude(element) * x_scales[i]; }
  __device__ __forceinline__ float of_weight(float element, int j) const {
    return magnitude(element) * weight_scales[j];
  }
};

__device__ __forceinline__ void load_four(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

template <class Change>
__device__ __forceinline__ void multiply_chunk(const Chunk<kTileM>& of_x, const Chunk<kTileN>& of_weight,
                                               const Change& change, float (&partial)[kDown][kAcross]) {
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    alignas(16) float x[kDown], weight[kAcross];
    load_four(x, &of_x.elements[k][ThreadTile::row0()]);
    load_four(x + 4, &of_x.elements[k][ThreadTile::row0() + 4]);
    load_four(weight, &of_weight.elements[k][ThreadTile::column0()]);
#pragma unroll
    for (int i = 0; i < kDown; ++i) x[i] = change.of_x(x[i], i);
#pragma unroll
    for (int j = 0; j < kAcross; ++j) weight[j] = change.of_weight(weight[j], j);
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) partial[i][j] = fmaf(x[i], weight[j], partial[i][j]);
    }
  }
}

// Adds columns [first, end) of the tile whose first rows are m0 of x and n0 of the weight. Sums of 64 products are
// added up apart: a single chain of K additions would be less accurate than SGEMM's.
template <class Change>
__device__ inline void multiply(const StridedMatrix& x, const StridedMatrix& weight, int64_t m0, int64_t n0,
                                int64_t first, int64_t end, const Change& change, Shared& shared, ThreadTile& tile) {
  const auto copy = [&](int64_t k, int stage) {
    if (k < end) {
      copy_chunk(x, m0, k, shared.x[stage]);
      copy_chunk(weight, n0, k, shared.weight[stage]);
    }
    commit_copies();  // an empty one too: the wait counts them
  };
  for (int stage = 0; stage < kStages - 1; ++stage) copy(first + stage * kChunk, stage);
  float partial[kDown][kAcross] = {};
  int chunk = 0, stage = 0;
  for (int64_t k = first; k < end; k += kChunk) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the chunk is there for all threads, and the previous one has been read
    copy(k + (kStages - 1) * kChunk, stage == 0 ? kStages - 1 : stage - 1);
    multiply_chunk(shared.x[stage], shared.weight[stage], change, partial);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (++chunk % kChunksPerPartialSum != 0 && k + kChunk < end) continue;
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        tile.sums[i][j] += partial[i][j];
        partial[i][j] = 0.0f;
      }
    }
  }
  __syncthreads();
}

}  // namespace epigemm::fp16_slices::fp32_tile
