// The repair kernel: looks at the rows' facts, and recomputes the results that need it from the fp32 operands. Beside
// it the same product without pieces, of all results.
#pragma once

#include <algorithm>

#include "elementwise/operands.cuh"
#include "gemm/sm90_fp16x3/fp32_tile.cuh"
#include "gemm/sm90_fp16x3/guard.h"
#include "gemm/sm90_fp16x3/repair.h"

namespace epigemm::sm90_fp16x3 {

using fp32_tile::kThreads;

constexpr int kCtasPerMultiprocessor = 2;  // 128 registers a thread

struct RepairArguments {
  StridedMatrix x, weight;
  const int32_t *x_facts, *weight_facts;
  float* out;
  int64_t out_row_stride;
  cuda::Operands<float> operands;
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

template <class Functor, int... Index>
__device__ __forceinline__ float apply(const RepairArguments& p, int64_t column, float z,
                                       std::integer_sequence<int, Index...>) {
  return Functor::apply(z, cuda::load_operand<Functor, float, Index + 1>(p.operands, column)...);
}

template <class Functor>
__device__ __forceinline__ void store(const RepairArguments& p, int64_t row, int64_t column, float z) {
  p.out[row * p.out_row_stride + column] = apply<Functor>(p, column, z, cuda::OperandIndices<Functor>{});
}

// Everything: all results of the tile; else those that the guard rejects, and the others keep what they have.
template <class Functor, bool Everything>
__device__ inline void recompute_tile(const RepairArguments& p, int64_t m0, int64_t n0) {
  __shared__ fp32_tile::Shared shared;
  fp32_tile::ThreadTile tile;
  fp32_tile::multiply(p.x, p.weight, m0, n0, shared, tile);
#pragma unroll
  for (int i = 0; i < fp32_tile::kDown; ++i) {
    const int64_t row = m0 + tile.row0() + i;
    if (row >= p.x.rows) break;
#pragma unroll
    for (int j = 0; j < fp32_tile::kAcross; ++j) {
      const int64_t column = n0 + tile.column0() + j;
      if (column >= p.weight.rows) break;
      if (!Everything && !is_rejected(p.x_facts[row], p.weight_facts[column], p.x.columns)) continue;
      store<Functor>(p, row, column, tile.sums[i][j]);
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

template <class Functor>
__device__ inline void repair_tile(const RepairArguments& p, int64_t m0, int64_t n0) {
  const RangeFacts x = facts_of_rows(p.x_facts, m0, min(m0 + fp32_tile::kTileM, p.x.rows));
  const RangeFacts weight = facts_of_rows(p.weight_facts, n0, min(n0 + fp32_tile::kTileN, p.weight.rows));
  if (out_of_range(x, weight, p.x.columns) || has_non_finite(x.flags | weight.flags)) {
    recompute_tile<Functor, /*Everything=*/false>(p, m0, n0);
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

template <class Functor>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor)
    repair_kernel(const __grid_constant__ RepairArguments p) {
  // All rows at once: the answer nearly always, and only some KB to read. The weight was split before x: done long ago.
  const RangeFacts weight = facts_of_rows(p.weight_facts, 0, p.weight.rows);
  if (!p.x_facts_are_there) wait_for_gemm();
  const RangeFacts x = facts_of_rows(p.x_facts, 0, p.x.rows);
  const bool nothing = !out_of_range(x, weight, p.x.columns) && !has_non_finite(x.flags | weight.flags);
  // In any case, even to return: whoever comes next waits for this kernel alone.
  wait_for_gemm();
  if (nothing) return;
  for_each_tile(p, [&](int64_t m0, int64_t n0) { repair_tile<Functor>(p, m0, n0); });
}

// The whole product in fp32 multiply-adds: every result has the same chain of additions, wherever it stands.
template <class Functor>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor)
    fp32_kernel(const __grid_constant__ RepairArguments p) {
  for_each_tile(p, [&](int64_t m0, int64_t n0) { recompute_tile<Functor, /*Everything=*/true>(p, m0, n0); });
}

inline RepairArguments repair_arguments(RepairProblem const& repair) {
  Problem const& problem = repair.split.problem;
  RepairArguments arguments{repair.x,
                            repair.weight,
                            repair.split.x.facts,
                            repair.split.weight.facts,
                            static_cast<float*>(problem.out.data),
                            problem.out.row_stride,
                            {},
                            // This kernel starts when every CTA of the GEMM allows it. The split's mainloop does so
                            // when it has seen the end of the kernels that wrote the facts; CUTLASS's own, which the
                            // scaled product has, may do so before.
                            problem.arithmetic == Arithmetic::Split};
  for (int i = 0; i < kMaxBuiltinOperands; ++i) {
    arguments.operands.data[i] = problem.operands[i].data;
    arguments.operands.values[i] = static_cast<float>(problem.operands[i].value);
  }
  return arguments;
}

inline unsigned ctas_of(Problem const& problem) {
  const int64_t tiles = ((problem.m + fp32_tile::kTileM - 1) / fp32_tile::kTileM) *
                        ((problem.n + fp32_tile::kTileN - 1) / fp32_tile::kTileN);
  const int64_t most = int64_t(kCtasPerMultiprocessor) * problem.device.multiprocessors;
  return static_cast<unsigned>(std::min(tiles, most));
}

template <class Functor>
void launch_repair(RepairProblem const& repair) {
  Problem const& problem = repair.split.problem;
  // Programmatic dependent launch: this kernel is ready when the GEMM ends.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas_of(problem));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(problem.stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  // A failure stays the runtime's last error, which the caller asks for.
  static_cast<void>(cudaLaunchKernelEx(&config, repair_kernel<Functor>, repair_arguments(repair)));
}

template <class Functor>
void launch_fp32(RepairProblem const& repair) {
  Problem const& problem = repair.split.problem;
  fp32_kernel<Functor>
      <<<ctas_of(problem), kThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(repair_arguments(repair));
}

}  // namespace epigemm::sm90_fp16x3
