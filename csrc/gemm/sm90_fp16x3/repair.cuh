// The repair kernel: looks at the rows' facts, and recomputes the results that need it from the fp32 operands. Beside
// it the same product without pieces, of all results.
#pragma once

#include "gemm/sm90_fp16x3/fp32_tile.cuh"
#include "gemm/sm90_fp16x3/guard.h"
#include "gemm/sm90_fp16x3/repair.h"
#include "link/open.h"

namespace epigemm::sm90_fp16x3 {

using fp32_tile::kThreads;

constexpr int kCtasPerMultiprocessor = 2;  // 128 registers a thread

struct RepairArguments {
  StridedMatrix x, weight;
  const int32_t *x_facts, *weight_facts;
  float* out;
  int64_t out_row_stride;
  link::Operands<float> operands;
  bool x_facts_are_there;  // before the GEMM ahead has finished
};

// --- the guard -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ RangeFacts across_warp(RangeFacts facts) {
  for (int distance = 16; distance > 0; distance /= 2) {
    facts = combine(facts, {__shfl_xor_sync(0xffffffffu, facts.least_large, distance),
                            __shfl_xor_sync(0xffffffffu, facts.least_large_of_tiny, distance),
                            __shfl_xor_sync(0xffffffffu, facts.flags, distance)});
  }
  return facts;
}

// The combined facts of rows [first, end), the same in every thread of the CTA.
__device__ inline RangeFacts facts_of_rows(const int32_t* facts, int64_t first, int64_t end) {
  __shared__ RangeFacts of_warp[kThreads / 32];
  RangeFacts mine;
  // Four at a time: `first` is a multiple of the tile's size, the section of facts is aligned.
  const int64_t whole = first + (end - first) / 4 * 4;
  for (int64_t row = first + 4 * int64_t(threadIdx.x); row < whole; row += 4 * kThreads) {
    const int4 four = __ldcg(reinterpret_cast<const int4*>(facts + row));
    mine = combine(combine(mine, range_facts(four.x)), range_facts(four.y));
    mine = combine(combine(mine, range_facts(four.z)), range_facts(four.w));
  }
  if (whole + threadIdx.x < end) mine = combine(mine, range_facts(__ldcg(facts + whole + threadIdx.x)));
  mine = across_warp(mine);
  __syncthreads();  // the previous call's result has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = of_warp[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) mine = combine(mine, of_warp[warp]);
  return mine;
}

// --- results -------------------------------------------------------------------------------------------------------

// Everything: all results of the tile; else those that the guard rejects, and the others keep what they have.
template <class Epilogue, bool Everything>
__device__ inline void recompute_tile(const RepairArguments& p, int64_t m0, int64_t n0) {
  __shared__ fp32_tile::Shared shared;
  fp32_tile::ThreadTile tile;
  fp32_tile::multiply(p.x, p.weight, m0, n0, shared, tile);
#pragma unroll
  for (int i = 0; i < fp32_tile::kDown; ++i) {
    const int64_t row = m0 + tile.row0() + i;
    if (row >= p.x.rows) break;
    // Anew for every row: operands kept for all of them would take the registers of the products.
    const Epilogue epilogue(p.operands, n0 + tile.column0(), p.weight.rows);
    const typename Epilogue::Row of_row = epilogue.row(row);
#pragma unroll
    for (int j = 0; j < fp32_tile::kAcross; ++j) {
      const int64_t column = n0 + tile.column0() + j;
      if (column >= p.weight.rows) break;
      if (!Everything && !is_rejected(p.x_facts[row], p.weight_facts[column], p.x.columns)) continue;
      p.out[row * p.out_row_stride + column] = epilogue.apply(tile.sums[i][j], of_row, j);
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

template <class Epilogue>
__device__ inline void repair_tile(const RepairArguments& p, int64_t m0, int64_t n0) {
  const RangeFacts x = facts_of_rows(p.x_facts, m0, min(m0 + fp32_tile::kTileM, p.x.rows));
  const RangeFacts weight = facts_of_rows(p.weight_facts, n0, min(n0 + fp32_tile::kTileN, p.weight.rows));
  if (out_of_range(x, weight, p.x.columns) || has_non_finite(x.flags | weight.flags)) {
    recompute_tile<Epilogue, /*Everything=*/false>(p, m0, n0);
  }
}

// Calls f(m0, n0) for the tiles of this CTA.
template <class F>
__device__ __forceinline__ void for_each_tile(const RepairArguments& p, F f) {
  const int64_t tiles_m = (p.x.rows + fp32_tile::kTileM - 1) / fp32_tile::kTileM;
  const int64_t tiles_n = (p.weight.rows + fp32_tile::kTileN - 1) / fp32_tile::kTileN;
  for (int64_t tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
    f(tile % tiles_m * fp32_tile::kTileM, tile / tiles_m * fp32_tile::kTileN);
  }
}

__device__ __forceinline__ void wait_for_gemm() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class Epilogue>
__device__ __forceinline__ void run_repair(const RepairArguments& p) {
  // All rows at once: the answer nearly always, and only some KB to read. The weight was split before x: done long ago.
  const RangeFacts weight = facts_of_rows(p.weight_facts, 0, p.weight.rows);
  if (!p.x_facts_are_there) wait_for_gemm();
  const RangeFacts x = facts_of_rows(p.x_facts, 0, p.x.rows);
  const bool nothing = !out_of_range(x, weight, p.x.columns) && !has_non_finite(x.flags | weight.flags);
  // In any case, even to return: whoever comes next waits for this kernel alone.
  wait_for_gemm();
  if (nothing) return;
  for_each_tile(p, [&](int64_t m0, int64_t n0) { repair_tile<Epilogue>(p, m0, n0); });
}

// The whole product in fp32 multiply-adds: every result has the same chain of additions, wherever it stands.
template <class Epilogue>
__device__ __forceinline__ void run_fp32(const RepairArguments& p) {
  for_each_tile(p, [&](int64_t m0, int64_t n0) { recompute_tile<Epilogue, /*Everything=*/true>(p, m0, n0); });
}

}  // namespace epigemm::sm90_fp16x3
