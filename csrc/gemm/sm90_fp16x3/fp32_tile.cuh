// One tile of an fp32 product in plain fp32 multiply-adds: what the range check rejects is recomputed so.
//
// Three bf16 slices and six products were tried first. They are no faster in a kernel of this size, and do not cover
// fp32's range: a row that spans more than 2^160, or a subnormal that meets a large number, loses bits whatever the
// scale. Multiply-adds lose nothing, and infinities and NaN come out as SGEMM's.
#pragma once

#include "gemm/sm90_fp16x3/layout.h"

namespace epigemm::sm90_fp16x3::fp32_tile {

constexpr int kTileM = 128, kTileN = 64, kChunk = 16;  // of x's rows, of the weight's rows, of K
constexpr int kThreads = 256;
constexpr int kDown = 8, kAcross = 4;  // results of one thread
constexpr int kThreadsAcross = kTileN / kAcross;
constexpr int kChunksPerPartialSum = 4;  // 64 of K

// Columns of a chunk are rows here; the padding keeps transposing stores off each other's banks.
struct Shared {
  alignas(16) float x[kChunk][kTileM + 4];
  alignas(16) float weight[kChunk][kTileN + 4];
};

// This thread's elements of the next chunk of one operand, on their way from memory to shared memory.
template <int Rows>
struct Chunk {
  static constexpr int kCount = Rows * kChunk / kThreads;
  static constexpr int kRowStep = kThreads / kChunk;
  float values[kCount];

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kChunk; }
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % kChunk; }

  __device__ __forceinline__ void load(const StridedMatrix& matrix, int64_t first_row, int64_t k) {
    const int64_t r = first_row + row(), c = k + column();
    const float* from = matrix.data + r * matrix.row_stride + c * matrix.column_stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i, from += kRowStep * matrix.row_stride) {
      values[i] = r + i * kRowStep < matrix.rows && c < matrix.columns ? *from : 0.0f;
    }
  }

  template <int Pitch>
  __device__ __forceinline__ void store(float (&shared)[kChunk][Pitch]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared[column()][row() + i * kRowStep] = values[i];
  }
};

struct ThreadTile {
  float sums[kDown][kAcross] = {};

  static __device__ int row0() { return static_cast<int>(threadIdx.x) / kThreadsAcross * kDown; }
  static __device__ int column0() { return static_cast<int>(threadIdx.x) % kThreadsAcross * kAcross; }
};

__device__ __forceinline__ void load_four(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

__device__ __forceinline__ void multiply_chunk(const Shared& shared, float (&partial)[kDown][kAcross]) {
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    alignas(16) float x[kDown], weight[kAcross];
    load_four(x, &shared.x[k][ThreadTile::row0()]);
    load_four(x + 4, &shared.x[k][ThreadTile::row0() + 4]);
    load_four(weight, &shared.weight[k][ThreadTile::column0()]);
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) partial[i][j] = fmaf(x[i], weight[j], partial[i][j]);
    }
  }
}

// All of K for the tile whose first rows are m0 of x and n0 of the weight. Sums of 64 products are added up apart: a
// single chain of K additions would be less accurate than SGEMM's.
__device__ inline void multiply(const StridedMatrix& x, const StridedMatrix& weight, int64_t m0, int64_t n0,
                                Shared& shared, ThreadTile& tile) {
  Chunk<kTileM> next_x;
  Chunk<kTileN> next_weight;
  next_x.load(x, m0, 0);
  next_weight.load(weight, n0, 0);
  float partial[kDown][kAcross] = {};
  int chunk = 0;
  for (int64_t k = 0; k < x.columns; k += kChunk) {
    __syncthreads();  // the previous chunk has been read
    next_x.store(shared.x);
    next_weight.store(shared.weight);
    __syncthreads();
    next_x.load(x, m0, k + kChunk);  // its latency hides behind the products
    next_weight.load(weight, n0, k + kChunk);
    multiply_chunk(shared, partial);
    if (++chunk % kChunksPerPartialSum != 0 && k + kChunk < x.columns) continue;
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

}  // namespace epigemm::sm90_fp16x3::fp32_tile
