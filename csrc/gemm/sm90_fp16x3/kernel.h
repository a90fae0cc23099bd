// The types of the kernels on fp16 slices. Their epilogue gets the product without the rows' scales.
#pragma once

#include <type_traits>

#include "gemm/fp16_slices/rescale.h"
#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90_fp16x3/as_it_lies_mainloop.h"
#include "gemm/sm90_fp16x3/mainloop.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

// Divides sums by the rows' scales.
struct RescaledSums {
  static constexpr bool has_roots = true, shares_roots = false;

  CUTLASS_DEVICE static float apply(float root_a, float root_b, float sum) {
    return fp16_slices::rescale(root_a, root_b, sum);
  }
};

template <int TileIndex>
struct ThreeProducts {
  static constexpr Tile tile = kSplitTiles[TileIndex];
  static constexpr bool kJudgesRows = false, kSharesK = false, kIsGrouped = false, kHasBlockScales = false;
  static_assert(tile.schedule == Schedule::Cooperative, "no such mainloop");
  static_assert(tile.stages >= 3, "with fewer stages the loads cannot run ahead");

  using Element = cutlass::half_t;
  static constexpr int kSlices = fp16_slices::kSlices, kWeights = 1;
  static constexpr bool kPrefetchesRows = tile.transposed;  // those of the weight, for a product with few rows of x

  template <class TileShape, class ClusterShape>
  using Mainloop = sm90_fp16x3::Mainloop<TileShape, ClusterShape, tile.stages>;
};

template <int TileIndex>
struct ScaledProduct
    : sm90::OneProduct<cutlass::half_t, kScaledTiles[TileIndex].stages, kScaledTiles[TileIndex].schedule> {
  static constexpr Tile tile = kScaledTiles[TileIndex];
};

// The weight as it lies. `TileIndex`: among the tiles of these kernels. Where rows are in groups, nobody knows a tile's
// weight before the kernel ahead is done.
template <Arithmetic arithmetic, int TileIndex, bool IsTransposed, bool IsGrouped = false>
struct AsItLies {
  static constexpr bool kIsSplit = arithmetic == Arithmetic::Split;
  static constexpr Tile tile = kIsSplit ? kAsItLiesSplitTiles[TileIndex] : kAsItLiesScaledTiles[TileIndex];
  static constexpr int kFewRows = 64;

  using Element = cutlass::half_t;
  using Operand = float;
  using Output = float;
  using Sums = RescaledSums;
  static constexpr int kWeights = 1;
  static constexpr bool kPrefetchesRows = !IsGrouped && tile.m <= kFewRows, kStartsNextEarly = true;
  static constexpr bool kJudgesRows = true, kSharesK = !IsGrouped && may_share_k(tile), kIsGrouped = IsGrouped;
  static constexpr bool kHasBlockScales = false;

  template <class TileShape, class ClusterShape>
  using Mainloop = AsItLiesMainloop<TileShape, ClusterShape, kIsSplit ? fp16_slices::kSlices : 1, tile.stages,
                                    IsTransposed, IsGrouped>;
};

template <Arithmetic arithmetic, int TileIndex>
struct Types : std::conditional_t<arithmetic == Arithmetic::Split, ThreeProducts<TileIndex>, ScaledProduct<TileIndex>> {
  using Operand = float;
  using Output = float;
  using Sums = RescaledSums;
  // The fixup reads the row statistics in the meantime. They are complete, because this kernel has waited for the
  // splits.
  static constexpr bool kStartsNextEarly = true;
};

}  // namespace epigemm::sm90_fp16x3
