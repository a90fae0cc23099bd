// The types of the kernels on fp16 slices.
#pragma once

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90_fp16x3/mainloop.h"
#include "gemm/sm90_fp16x3/rescale.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

struct Results {
  using Operand = float;
  using Output = float;
  using Sums = RescaledSums;
};

template <int TileIndex>
struct ScaledTypes
    : Results,
      sm90::OneProduct<cutlass::half_t, kScaledTiles[TileIndex].stages, kScaledTiles[TileIndex].schedule> {
  static constexpr Tile tile = kScaledTiles[TileIndex];
};

template <int TileIndex>
struct SplitTypes : Results {
  static constexpr Tile tile = kSplitTiles[TileIndex];
  static_assert(tile.schedule == Schedule::Cooperative && tile.stages >= 3, "the loads cannot run ahead");

  using Element = cutlass::half_t;
  static constexpr int kSlices = sm90_fp16x3::kSlices;
  template <class TileShape, class ClusterShape>
  using Mainloop = sm90_fp16x3::Mainloop<TileShape, ClusterShape, tile.stages, /*PrefetchA=*/tile.transposed>;
};

}  // namespace epigemm::sm90_fp16x3
