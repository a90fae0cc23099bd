// D = epilogue(x @ weight^T) in fp32 multiply-adds, for few rows of x, or few of the weight. The other matrix, with
// many rows, is read once from memory, and by nobody twice: that takes all the time.
//
// - A warp has four of the many rows, and each lane a few numbers of each: the loads of some steps are on their
//   way while one is multiplied. They pass by L1.
// - The few rows come to shared memory by cp.async, a stage while the one before is multiplied by all warps.
// - A lane sums its part of K for all its results. Then lanes add up by halves: each keeps the sums of one half of the
//   results and gives away the others.
// - K is divided among the CTAs of a cluster, so that all multiprocessors load. Each CTA adds up a part of the results
//   from all shared memories, in the order of K: two calls give the same bits.
#pragma once

#include <cooperative_groups.h>

#include "device/dependent.cuh"
#include "gemm/sm90_few_rows/arguments.h"

namespace epigemm::sm90_few_rows {

// A number, or none where `is_there` is false: then 0. By a predicate and no branch, so that it may be under way while
// others are multiplied.
__device__ __forceinline__ float4 load_four(const float* from, bool is_there) {
  float4 x = {0, 0, 0, 0};
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0;"
      " @p ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return x;
}
__device__ __forceinline__ float load_one(const float* from, bool is_there) {
  float x = 0;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.L1::no_allocate.f32 %0, [%1];}"
               : "+f"(x)
               : "l"(from), "r"(static_cast<int>(is_there)));
  return x;
}

// Bytes to shared memory; zeros where `is_there` is false.
template <int Bytes>
__device__ __forceinline__ void copy_async(float* to, const float* from, bool is_there) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(Bytes),
               "r"(is_there ? Bytes : 0)
               : "memory");
}

// Sums `values` over the lanes of a warp. The lane keeps max(1, Count / 32) of the sums, those from the returned number
// on; of fewer than 32, several lanes keep the same.
template <int Count>
__device__ __forceinline__ int add_up(float (&values)[Count], int lane) {
  int first = 0;
#pragma unroll
  for (int distance = 16, count = Count; distance > 0; distance /= 2, count = count > 1 ? count / 2 : 1) {
    const int half = count / 2;
    const bool is_upper = lane & distance;
    if (half == 0) {
      values[0] += __shfl_xor_sync(~0u, values[0], distance);
      continue;
    }
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = is_upper ? values[i] : values[half + i], kept = is_upper ? values[half + i] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, given, distance);
    }
    if (is_upper) first += half;
  }
  return first;
}

template <int TileIndex>
struct Kernel {
  static constexpr Tile tile = kTiles[TileIndex];
  static constexpr int kWarps = tile.threads / 32, kRows = tile.many / kWarps;  // of a warp
  static constexpr int kStepK = 32 * 4, kSteps = kStageK / kStepK, kAhead = tile.ahead;
  static_assert(kSteps % kAhead == 0, "the buffers' numbers are constants");

  struct Shared {
    float few[2][tile.few][kStageK];
    float sums[tile.many * tile.few];  // [row of many, row of few]
  };
  static_assert(sizeof(Shared) == shared_bytes(tile));

  // What a CTA has of K, in stages.
  struct Part {
    int first, end;
  };

  template <bool HasVectors>
  __device__ __forceinline__ static void bring(const Arguments& p, Shared& shared, int buffer, int stage) {
    constexpr int kNumbers = HasVectors ? 4 : 1;
    constexpr int kOfRow = kStageK / kNumbers;
#pragma unroll 1  // the loads of the many rows on their way have the registers
    for (int i = threadIdx.x; i < tile.few * kOfRow; i += tile.threads) {
      const int row = i / kOfRow, k = i % kOfRow * kNumbers, at = stage * kStageK + k;
      const bool is_there = row < p.few.count && at < p.k;
      copy_async<4 * kNumbers>(&shared.few[buffer][row][k], p.few.data + (is_there ? row * p.few.stride + at : 0),
                               is_there);
    }
    asm volatile("cp.async.commit_group;");
  }

  // One step's numbers. `rows`: the lane's first ones of a stage; `left`: of the CTA's part of K, from there.
  template <bool HasVectors>
  __device__ __forceinline__ static void load(const float* const (&rows)[kRows], int step, int left,
                                              float (&to)[kRows][4]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (HasVectors) {
        const float4 four = load_four(rows[r] + step * kStepK, step * kStepK < left);
        to[r][0] = four.x, to[r][1] = four.y, to[r][2] = four.z, to[r][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = step * kStepK + 32 * i;
          to[r][i] = load_one(rows[r] + at, at < left);
        }
      }
    }
  }

  template <bool HasVectors>
  __device__ __forceinline__ static void multiply(const float (&many)[kRows][4], const float* few, int lane,
                                                  float (&sums)[kRows * tile.few]) {
#pragma unroll
    for (int m = 0; m < tile.few; ++m) {
      float x[4];
      if constexpr (HasVectors) {
        const float4 four = *reinterpret_cast<const float4*>(few + m * kStageK + 4 * lane);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = few[m * kStageK + lane + 32 * i];
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[r * tile.few + m] = fmaf(many[r][i], x[i], sums[r * tile.few + m]);
      }
    }
  }

  template <bool HasVectors>
  __device__ __forceinline__ static void multiply_part(const Arguments& p, Shared& shared, int row0, Part part,
                                                       float (&sums)[kRows * tile.few]) {
    const int lane = threadIdx.x % 32, begin = part.first * kStageK + (HasVectors ? 4 : 1) * lane;
    const float* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = p.many.data + min(row0 + r, p.many.count - 1) * p.many.stride + begin;
    int left = min(p.k, part.end * kStageK) - begin;
    float many[kAhead][kRows][4];
    bring<HasVectors>(p, shared, 0, part.first);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load<HasVectors>(rows, i, left, many[i]);
    int buffer = 0;
#pragma unroll 1
    for (int stage = part.first; stage < part.end; ++stage, buffer ^= 1) {
      // Behind the last stage nothing is read of what comes.
      bring<HasVectors>(p, shared, buffer ^ 1, min(stage + 1, part.end - 1));
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        multiply<HasVectors>(many[step % kAhead], &shared.few[buffer][0][step * kStepK], lane, sums);
        load<HasVectors>(rows, step + kAhead, left, many[step % kAhead]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] += kStageK;
      left -= kStageK;
      __syncthreads();  // the buffer has been read
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  template <class Epilogue>
  __device__ __forceinline__ static void finish(const Arguments& p, int row, int few, float sum) {
    const int64_t m = p.are_few_of_x ? few : row, n = p.are_few_of_x ? row : few;
    const Epilogue epilogue(p.operands, n, p.are_few_of_x ? p.many.count : p.few.count);
    const typename Epilogue::Row of_row = epilogue.row(m);
    p.out[m * p.out_row_stride + n] = epilogue.apply(sum, of_row, 0);
    if (epigemm_has_store()) p.stored[m * p.stored_row_stride + n] = epilogue.stored(sum, of_row, 0);
  }

  template <class Epilogue>
  __device__ __forceinline__ static void run(const Arguments& p) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared*>(memory);
    const auto cluster = cooperative_groups::this_cluster();
    const int ctas = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
    const int stages = (p.k + kStageK - 1) / kStageK;
    const Part part{stages * rank / ctas, stages * (rank + 1) / ctas};
    const int first_row = static_cast<int>(blockIdx.x) / ctas * tile.many, warp = threadIdx.x / 32;
    cuda::wait_for_kernel_ahead();

    float sums[kRows * tile.few] = {};
    const int row0 = first_row + warp * kRows;
    if (p.has_vectors) {
      multiply_part<true>(p, shared, row0, part, sums);
    } else {
      multiply_part<false>(p, shared, row0, part, sums);
    }
    const int first = add_up(sums, threadIdx.x % 32);
    constexpr int kKept = kRows * tile.few > 32 ? kRows * tile.few / 32 : 1;
#pragma unroll
    for (int i = 0; i < kKept; ++i) shared.sums[warp * kRows * tile.few + first + i] = sums[i];
    if (ctas > 1) {
      cluster.sync();
    } else {
      __syncthreads();  // without a fence of the whole GPU
    }

    // Neighbouring threads have neighbours in memory: of D's row, if the few rows are x's.
    constexpr int kResults = tile.many * tile.few;
    const int each = (kResults + ctas - 1) / ctas, end = min((rank + 1) * each, kResults);
    for (int i = rank * each + static_cast<int>(threadIdx.x); i < end; i += tile.threads) {
      const int row = p.are_few_of_x ? i % tile.many : i / tile.few,
                few = p.are_few_of_x ? i / tile.many : i % tile.few;
      if (first_row + row >= p.many.count || few >= p.few.count) continue;
      float sum = 0;
      for (int cta = 0; cta < ctas; ++cta) sum += cluster.map_shared_rank(shared.sums, cta)[row * tile.few + few];
      finish<Epilogue>(p, first_row + row, few, sum);
    }
    if (ctas > 1) cluster.sync();  // a CTA's shared memory must exist until the others have read it
  }
};

}  // namespace epigemm::sm90_few_rows
