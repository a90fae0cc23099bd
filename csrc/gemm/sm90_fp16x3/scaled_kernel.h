// The types of the kernels of Arithmetic::Scaled: one product of fp16 slices.
#pragma once

#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90_fp16x3/rescale.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

template <int TileIndex>
struct ScaledTypes {
  using Element = cutlass::half_t;
  using Operand = float;
  using Output = float;
  using Sums = RescaledSums;
  static constexpr Tile tile = kScaledTiles[TileIndex];
};

}  // namespace epigemm::sm90_fp16x3
