// The types of the large tiles' kernels that multiply 8-bit numbers with scales.
#pragma once

#include <type_traits>

#include "gemm/sm90/quantise.cuh"
#include "gemm/sm90_tma/kernel.h"
#include "gemm/sm90_tma/promoted_mainloop.h"

namespace epigemm::sm90_tma {

namespace element {
using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
// Of results.
using float32 = float;
using bfloat16_to_e4m3 = cutlass::float_e4m3_t;  // with one scale
using bfloat16_to_blocks = sm90::InBlocks;
}  // namespace element

// z = acc * scale of x's row * scale of the weight's row
struct ScaledSums {
  static constexpr bool has_roots = true, shares_roots = true;

  CUTLASS_DEVICE static float apply(float of_row, float of_column, float sum) { return sum * of_row * of_column; }
};

template <class Result>
constexpr Results8 kResults = Results8::Wide;
template <>
inline constexpr Results8 kResults<element::bfloat16_to_e4m3> = Results8::OneScale;
template <>
inline constexpr Results8 kResults<element::bfloat16_to_blocks> = Results8::Blocks;

template <class X, class Weight, class Result, Sums8 sums, int TileIndex, int Weights = 1>
struct EightBitTypes {
  static constexpr bool kIsPromoted = sums != Sums8::Fast, kIsQuantised = kResults<Result> != Results8::Wide;
  static constexpr Tile tile = tiles_of_8_bits(sums, /*is_pair=*/Weights == 2, kResults<Result>).tiles[TileIndex];
  static constexpr int kSlices = 1, kWeights = Weights;
  static constexpr bool kPrefetchesRows = false, kStartsNextEarly = false, kJudgesRows = false,
                        kSharesK = may_share_k(tile, Weights == 2), kIsGrouped = false,
                        kHasBlockScales = sums == Sums8::Blocks;
  static constexpr int kAlignment = 16;
  static_assert(!kIsPromoted || tile.schedule != Schedule::Pingpong, "a warpgroup has no registers for both sums");

  using Element = X;
  using Operand = std::conditional_t<kIsQuantised, cutlass::bfloat16_t, Result>;
  using Output = Result;
  using Sums = std::conditional_t<kHasBlockScales, sm90::PlainSums, ScaledSums>;
  using A = std::conditional_t<tile.transposed, Weight, X>;
  using B = std::conditional_t<tile.transposed, X, Weight>;

  template <class TileShape, class ClusterShape>
  using OneFastMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, cutlass::layout::RowMajor, kAlignment, B,
      cutlass::layout::ColumnMajor, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<tile.stages>,
      std::conditional_t<tile.schedule == Schedule::Cooperative,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                         cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum>>::CollectiveOp;

  template <class TileShape, class ClusterShape>
  using FastMainloop = std::conditional_t<Weights == 2, sm90::PairMainloop<OneFastMainloop<TileShape, ClusterShape>>,
                                          OneFastMainloop<TileShape, ClusterShape>>;
  static_assert(!kSharesK || Weights == 1, "its CTAs load from the first stage on");

  template <class TileShape>
  using Factors =
      std::conditional_t<kHasBlockScales, BlockFactors<cute::get<1>(TileShape{}), Weights, tile.transposed>, NoFactors>;

  template <class TileShape, class ClusterShape>
  using Mainloop =
      std::conditional_t<kIsPromoted,
                         PromotedMainloop<FastMainloop<TileShape, ClusterShape>, Factors<TileShape>, kSharesK>,
                         std::conditional_t<kSharesK, SharedKMainloop<FastMainloop<TileShape, ClusterShape>>,
                                            FastMainloop<TileShape, ClusterShape>>>;
};

}  // namespace epigemm::sm90_tma
