// The types of the large tiles' kernels that multiply 8-bit numbers with scales.
#pragma once

#include <type_traits>

#include "gemm/sm90_tma/kernel.h"
#include "gemm/sm90_tma/promoted_mainloop.h"

namespace epigemm::sm90_tma {

namespace element {
using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
using float32 = float;  // of results
}  // namespace element

// z = acc * scale of x's row * scale of the weight's row
struct ScaledSums {
  static constexpr bool has_roots = true, shares_roots = true;

  CUTLASS_DEVICE static float apply(float of_row, float of_column, float sum) { return sum * of_row * of_column; }
};

enum class Sums8 { Fast, Promoted };

template <class X, class Weight, class Result, Sums8 sums, int TileIndex>
struct EightBitTypes {
  static constexpr bool kIsPromoted = sums == Sums8::Promoted;
  static constexpr Tile tile = kIsPromoted ? kPromotedTiles[TileIndex] : kFastTiles[TileIndex];
  static constexpr int kSlices = 1, kWeights = 1;
  static constexpr bool kPrefetchesRows = false, kStartsNextEarly = false, kJudgesRows = false, kSharesK = false,
                        kIsGrouped = false;
  static constexpr int kAlignment = 16;
  static_assert(!kIsPromoted || tile.schedule != Schedule::Pingpong, "a warpgroup has no registers for both sums");

  using Element = X;
  using Operand = Result;
  using Output = Result;
  using Sums = ScaledSums;
  using A = std::conditional_t<tile.transposed, Weight, X>;
  using B = std::conditional_t<tile.transposed, X, Weight>;

  template <class TileShape, class ClusterShape>
  using FastMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, cutlass::layout::RowMajor, kAlignment, B,
      cutlass::layout::ColumnMajor, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<tile.stages>,
      std::conditional_t<tile.schedule == Schedule::Cooperative,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                         cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum>>::CollectiveOp;

  template <class TileShape, class ClusterShape>
  using Mainloop = std::conditional_t<kIsPromoted, PromotedMainloop<FastMainloop<TileShape, ClusterShape>>,
                                      FastMainloop<TileShape, ClusterShape>>;
};

}  // namespace epigemm::sm90_tma
