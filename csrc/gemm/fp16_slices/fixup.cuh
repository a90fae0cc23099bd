// The fixup kernel: looks at the row statistics, and recomputes the results that need it from the fp32 operands. Beside
// it the same product without slices, of all results.
//
// Where rows are in groups (gemm/problem.h), each group is a product by itself, whose rows of x and of the weight end
// where the group does. Only what may have to be recomputed is looked for by group: so nearly always no kernel asks
// which group is where.
#pragma once

#include "device/dependent.cuh"
#include "gemm/fp16_slices/fixup.h"
#include "gemm/fp16_slices/fixup_moments.cuh"
#include "gemm/fp16_slices/fp32_tile.cuh"
#include "gemm/fp16_slices/range_check.h"
#include "gemm/fp16_slices/weight_scale.h"
#include "open/contract.h"

namespace epigemm::fp16_slices {

using fp32_tile::kThreads;

constexpr int kCtasPerMultiprocessor = 2;  // 128 registers a thread

struct FixupArguments {
  StridedMatrix x, weight;
  SplitMatrix split_x, split_weight;
  float *out, *stored;
  int64_t out_row_stride, stored_row_stride;
  FixupMoments moments;
  open::Operands<float> operands;
  bool is_weight_judged_late;  // FixupProblem
};

// `weight` is the first group's; `split_weight` is that of all groups' rows.
struct GroupedFixupArguments : FixupArguments {
  Groups groups;
};

// --- the range check -----------------------------------------------------------------------------------------------

__device__ __forceinline__ RangeStatistics across_warp(RangeStatistics statistics) {
  for (int distance = 16; distance > 0; distance /= 2) {
    statistics = combine(statistics, {__shfl_xor_sync(0xffffffffu, statistics.least_large, distance),
                                      __shfl_xor_sync(0xffffffffu, statistics.least_large_of_tiny, distance),
                                      __shfl_xor_sync(0xffffffffu, statistics.flags, distance)});
  }
  return statistics;
}

// The combined statistics of rows [first, end), the same in every thread of the CTA. Without IsAligned there are at
// most kThreads of them.
template <bool IsAligned = true>
__device__ inline RangeStatistics statistics_of_rows(const int32_t* statistics, int64_t first, int64_t end) {
  __shared__ RangeStatistics of_warp[kThreads / 32];
  RangeStatistics mine;
  // Four at a time: `first` is a multiple of the tile's size, the section of statistics is aligned.
  const int64_t whole = IsAligned ? first + (end - first) / 4 * 4 : first;
  for (int64_t row = first + 4 * int64_t(threadIdx.x); row < whole; row += 4 * kThreads) {
    const int4 four = __ldcg(reinterpret_cast<const int4*>(statistics + row));
    mine = combine(combine(mine, range_statistics(four.x)), range_statistics(four.y));
    mine = combine(combine(mine, range_statistics(four.z)), range_statistics(four.w));
  }
  if (whole + threadIdx.x < end) mine = combine(mine, range_statistics(__ldcg(statistics + whole + threadIdx.x)));
  mine = across_warp(mine);
  __syncthreads();  // the previous call's result has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = of_warp[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) mine = combine(mine, of_warp[warp]);
  return mine;
}

// --- which results of a tile ---------------------------------------------------------------------------------------

// A set of this thread's results of a tile: bit kAcross * i + j.
using ResultSet = uint32_t;
constexpr ResultSet kAllResults = ~ResultSet{0};
static_assert(fp32_tile::kDown * fp32_tile::kAcross == 32);

__device__ __forceinline__ constexpr ResultSet one_result(int i, int j) {
  return ResultSet{1} << (fp32_tile::kAcross * i + j);
}

// The set of results (i, j) for which holds(i, j, row of x, row of the weight) is true.
template <class F>
__device__ __forceinline__ ResultSet results_where(const FixupArguments& p, int64_t m0, int64_t n0, F holds) {
  ResultSet set = 0;
  const int64_t row0 = m0 + fp32_tile::ThreadTile::row0(), column0 = n0 + fp32_tile::ThreadTile::column0();
#pragma unroll
  for (int i = 0; i < fp32_tile::kDown; ++i) {
    if (row0 + i >= p.x.rows) break;
#pragma unroll
    for (int j = 0; j < fp32_tile::kAcross; ++j) {
      if (column0 + j >= p.weight.rows) break;
      if (holds(i, j, row0 + i, column0 + j)) set |= one_result(i, j);
    }
  }
  return set;
}

__device__ __forceinline__ fp32_tile::ScaledMagnitudes scaled_magnitudes(const FixupArguments& p, int64_t m0,
                                                                         int64_t n0) {
  fp32_tile::ScaledMagnitudes change;
  const int64_t row0 = m0 + fp32_tile::ThreadTile::row0(), column0 = n0 + fp32_tile::ThreadTile::column0();
#pragma unroll
  for (int i = 0; i < fp32_tile::kDown; ++i) {
    change.x_scales[i] = row0 + i < p.x.rows ? scale_of_root(p.split_x.roots[row0 + i]) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < fp32_tile::kAcross; ++j) {
    change.weight_scales[j] = column0 + j < p.weight.rows ? scale_of_root(p.split_weight.roots[column0 + j]) : 0.0f;
  }
  return change;
}

__device__ __forceinline__ int32_t tiny_of_weight(const FixupArguments& p, int64_t row) {
  return __ldcg(p.split_weight.tiny + row);
}

// Counts the tiny elements of the tile's rows of the weight that nobody has counted (weight_scale.h: their statistics
// say that there are some). Several CTAs may do so at once, and write the same.
__device__ inline void count_tiny(const FixupArguments& p, int64_t n0) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t end = min(n0 + fp32_tile::kTileN, p.weight.rows);
  for (int64_t row = n0 + warp; row < end; row += kThreads / 32) {
    if (tiny_of_weight(p, row) != kUncounted) continue;
    const float scale = scale_of_root(p.split_weight.roots[row]);
    int32_t tiny = 0;
    for (int64_t k = lane; k < p.weight.columns; k += 32) {
      const float x = p.weight.data[row * p.weight.row_stride + k * p.weight.column_stride];
      tiny += tiny_count(x, x * scale);
    }
    tiny = __reduce_add_sync(0xffffffffu, tiny);
    if (lane == 0) p.split_weight.tiny[row] = tiny;
  }
  __syncthreads();
}

// The results to compute again. Each depends on its two rows alone, so a row's results do not depend on its neighbours.
// An eighth of K is summed, in whole partial sums. If that proves nothing, its cost is small compared with computing
// again.
__device__ inline ResultSet rejected_results(const FixupArguments& p, int64_t m0, int64_t n0,
                                             fp32_tile::Shared& shared) {
  const int64_t summed = p.x.columns / 8;
  const ResultSet non_finite = results_where(p, m0, n0, [&](int, int, int64_t row, int64_t column) {
    return has_non_finite(p.split_x.statistics[row] | p.split_weight.statistics[column]);
  });
  const auto are_in_doubt = [&] {
    return ~non_finite & results_where(p, m0, n0, [&](int, int, int64_t row, int64_t column) {
      const int32_t of_weight = p.split_weight.statistics[column];
      return out_of_range(range_statistics(p.split_x.statistics[row]),
                          range_statistics(tiny_of_weight(p, column) ? of_weight : of_weight & ~kTiny), p.x.columns);
    });
  };
  ResultSet in_doubt = are_in_doubt();
  if (p.is_weight_judged_late && __syncthreads_or(in_doubt)) {
    count_tiny(p, n0);
    in_doubt = are_in_doubt();
  }
  const fp32_tile::ScaledMagnitudes magnitudes = scaled_magnitudes(p, m0, n0);
  fp32_tile::ThreadTile tile;
  for (int64_t k = 0; k < summed && __syncthreads_or(in_doubt); k += fp32_tile::kPartialSum) {
    const int64_t end = min(k + fp32_tile::kPartialSum, p.x.columns);
    fp32_tile::multiply(p.x, p.weight, m0, n0, k, end, magnitudes, shared, tile);
    in_doubt &= ~results_where(p, m0, n0, [&](int i, int j, int64_t row, int64_t column) {
      return is_large_enough(tile.sums[i][j], p.split_x.tiny[row] + tiny_of_weight(p, column));
    });
  }
  return non_finite | in_doubt;
}

// --- results -------------------------------------------------------------------------------------------------------

// Other results keep their values.
template <class Epilogue>
__device__ inline void recompute(const FixupArguments& p, int64_t m0, int64_t n0, ResultSet wanted,
                                 fp32_tile::Shared& shared) {
  fp32_tile::ThreadTile tile;
  fp32_tile::multiply(p.x, p.weight, m0, n0, 0, p.x.columns, fp32_tile::Elements{}, shared, tile);
#pragma unroll
  for (int i = 0; i < fp32_tile::kDown; ++i) {
    const int64_t row = m0 + tile.row0() + i;
    if (row >= p.x.rows) break;
    // Made again for every row, because operands of all rows would need the registers of the products.
    const Epilogue epilogue(p.operands, n0 + tile.column0(), p.weight.rows);
    const typename Epilogue::Row of_row = epilogue.row(row);
#pragma unroll
    for (int j = 0; j < fp32_tile::kAcross; ++j) {
      const int64_t column = n0 + tile.column0() + j;
      if (column >= p.weight.rows) break;
      if (!(wanted & one_result(i, j))) continue;
      p.out[row * p.out_row_stride + column] = epilogue.apply(tile.sums[i][j], of_row, j);
      if (epigemm_has_store()) {
        p.stored[row * p.stored_row_stride + column] = epilogue.stored(tile.sums[i][j], of_row, j);
      }
    }
  }
}

// --- the kernel ----------------------------------------------------------------------------------------------------

template <class Epilogue, bool IsGrouped = false>
__device__ inline void fixup_tile(const FixupArguments& p, int64_t m0, int64_t n0) {
  __shared__ fp32_tile::Shared shared;
  constexpr bool kIsAligned = !IsGrouped;
  const RangeStatistics x =
      statistics_of_rows<kIsAligned>(p.split_x.statistics, m0, min(m0 + fp32_tile::kTileM, p.x.rows));
  const RangeStatistics weight =
      statistics_of_rows<kIsAligned>(p.split_weight.statistics, n0, min(n0 + fp32_tile::kTileN, p.weight.rows));
  if (!out_of_range(x, weight, p.x.columns) && !has_non_finite(x.flags | weight.flags)) return;
  const ResultSet rejected = rejected_results(p, m0, n0, shared);
  if (!__syncthreads_or(rejected)) return;
  recompute<Epilogue>(p, m0, n0, rejected, shared);
  if (!p.moments.of_columns) return;
  __syncthreads();  // the results are written
  reduce_columns(p.moments, {p.out, p.out_row_stride, m0, n0, p.x.rows, p.weight.rows});
}

// Calls f(m0, n0) for the tiles of this CTA. Tiles are numbered along rows of tiles first, so the tiles of one failing
// row of x go to different CTAs.
template <class F>
__device__ __forceinline__ void for_each_tile(const FixupArguments& p, F f) {
  const int64_t tiles_m = (p.x.rows + fp32_tile::kTileM - 1) / fp32_tile::kTileM;
  const int64_t tiles_n = (p.weight.rows + fp32_tile::kTileN - 1) / fp32_tile::kTileN;
  for (int64_t tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
    f(tile / tiles_n * fp32_tile::kTileM, tile % tiles_n * fp32_tile::kTileN);
  }
}

template <class Epilogue>
__device__ __forceinline__ void run_fixup(const FixupArguments& p) {
  // All rows at once: mostly this decides, and it reads only some KB. The statistics are complete, because the GEMM
  // lets this kernel start when all its CTAs have waited for the splits. Those of a weight that it judges itself are
  // not.
  const RangeStatistics x = statistics_of_rows(p.split_x.statistics, 0, p.x.rows);
  const bool is_late = p.is_weight_judged_late;
  if (is_late) cuda::wait_for_kernel_ahead();
  const RangeStatistics weight = statistics_of_rows(
      is_late ? statistics_of_groups(p.split_weight.roots, p.weight.rows) : p.split_weight.statistics, 0,
      is_late ? groups_of(p.weight.rows) : p.weight.rows);
  const bool nothing = !out_of_range(x, weight, p.x.columns) && !has_non_finite(x.flags | weight.flags);
  // In any case, even before returning, because the next kernel waits only for this one.
  cuda::wait_for_kernel_ahead();
  if (nothing) return;
  for_each_tile(p, [&](int64_t m0, int64_t n0) { fixup_tile<Epilogue>(p, m0, n0); });
}

// --- rows in groups ------------------------------------------------------------------------------------------------

// The row behind a group that begins at row `begin`. A wrong end must not lead out of D: it counts as the beginning, or
// as m (sm90/groups.cuh).
__device__ __forceinline__ int64_t end_of_group(const Groups& groups, int64_t group, int64_t begin, int64_t m) {
  if (groups.are_alike) return begin + m / groups.count;
  return max(begin, min(int64_t(__ldcg(groups.ends + group)), m));
}

// The row behind all groups, the same in every thread of the CTA.
__device__ inline int64_t rows_in_groups(const Groups& groups, int64_t m) {
  __shared__ int most;
  if (groups.are_alike) return m;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  for (int64_t group = threadIdx.x; group < groups.count; group += kThreads) {
    atomicMax(&most, static_cast<int>(end_of_group(groups, group, 0, m)));
  }
  __syncthreads();
  return most;
}

// The product of a group that ends at row `end`.
__device__ inline FixupArguments product_of(const GroupedFixupArguments& p, int64_t group, int64_t end) {
  FixupArguments product = p;
  const int64_t ahead = group * p.weight.rows;
  product.x.rows = end;
  product.weight.data += group * p.groups.weight_stride;
  product.split_weight.roots += ahead;
  product.split_weight.statistics += ahead;
  product.split_weight.tiny += ahead;
#pragma unroll
  for (int i = 0; i < open::kColumns; ++i) {
    const void*& vector = product.operands.data[open::kColumn0 + i];
    if (vector) vector = static_cast<const float*>(vector) + ahead;
  }
  return product;
}

// Calls f(product, m0, n0) for the tiles of this CTA. The tiles are numbered from group to group. The product is in
// shared memory: in registers some of it would be spilled.
template <class F>
__device__ __forceinline__ void for_each_grouped_tile(const GroupedFixupArguments& p, F f) {
  __shared__ FixupArguments product;
  const int64_t across = (p.weight.rows + fp32_tile::kTileN - 1) / fp32_tile::kTileN;
  int64_t begin = 0, ahead = 0, next = blockIdx.x;
  for (int group = 0; group < p.groups.count; ++group) {
    const int64_t end = end_of_group(p.groups, group, begin, p.x.rows);
    const int64_t behind = ahead + (end - begin + fp32_tile::kTileM - 1) / fp32_tile::kTileM * across;
    if (next < behind) {
      __syncthreads();  // the group before has been read
      if (threadIdx.x == 0) product = product_of(p, group, end);
      __syncthreads();
      for (; next < behind; next += gridDim.x) {
        const int64_t tile = next - ahead;
        f(product, begin + tile / across * fp32_tile::kTileM, tile % across * fp32_tile::kTileN);
      }
    }
    begin = end, ahead = behind;
  }
}

// As run_fixup, behind a GEMM that has judged the weights itself. Rows of x behind all groups, and weights of groups
// without rows, do not count, whatever they hold.
template <class Epilogue>
__device__ __forceinline__ void run_grouped_fixup(const GroupedFixupArguments& p) {
  const RangeStatistics x = statistics_of_rows(p.split_x.statistics, 0, rows_in_groups(p.groups, p.x.rows));
  cuda::wait_for_kernel_ahead();
  const RangeStatistics weights =
      statistics_of_rows(statistics_of_groups(p.split_weight.roots, p.groups.count * p.weight.rows), 0,
                         p.groups.count * groups_of(p.weight.rows));
  if (!out_of_range(x, weights, p.x.columns) && !has_non_finite(x.flags | weights.flags)) return;
  for_each_grouped_tile(p, [](const FixupArguments& product, int64_t m0, int64_t n0) {
    fixup_tile<Epilogue, /*IsGrouped=*/true>(product, m0, n0);
  });
}

// --- without slices ------------------------------------------------------------------------------------------------

// The whole product in fp32 multiply-adds. Every result has the same order of additions, whatever its place.
template <class Epilogue>
__device__ __forceinline__ void run_fp32(const FixupArguments& p) {
  __shared__ fp32_tile::Shared shared;
  for_each_tile(p, [&](int64_t m0, int64_t n0) { recompute<Epilogue>(p, m0, n0, kAllResults, shared); });
}

}  // namespace epigemm::fp16_slices
