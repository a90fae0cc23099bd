// What the cost model knows of each tile of the kernels on fp16 pieces: fitted to plan sweeps on an H200
// (docs/performance.md). Apart from tiles.h, so that a new measurement recompiles dispatch alone.
#pragma once

#include "gemm/split/tiles.h"

namespace epigemm::split {

struct TileCost {
  double step_microseconds;      // one stage of K (64) of one tile, at sustained clocks, if its bytes come in time
  double epilogue_microseconds;  // what the epilogue adds to each tile beyond what the schedule hides
  double traffic_factor;         // bound by memory: the time over that of a copy of as many bytes
};

constexpr TileCost kSplitTileCosts[] = {
    {1.05, 2.0, 1.15},  // 128x128 2x1
    {0.50, 1.5, 1.15},  // 128x64 1x2
    {0.45, 1.0, 1.17},  // 64x128 transposed
    {0.32, 1.0, 1.05},  // 16x128 transposed
};

constexpr TileCost kScaledTileCosts[] = {
    {0.77, 3.0, 1.15},  // 128x256 2x1 cooperative
    {0.39, 1.0, 1.15},  // 128x128 2x1 pingpong
    {0.28, 0.5, 1.15},  // 64x128 1x2 pingpong
};

static_assert(sizeof(kSplitTileCosts) / sizeof(TileCost) == kSplitTileCount, "every tile needs its measured cost");
static_assert(sizeof(kScaledTileCosts) / sizeof(TileCost) == kScaledTileCount, "every tile needs its measured cost");

constexpr const TileCost& cost_of(Arithmetic arithmetic, int index) {
  return arithmetic == Arithmetic::Split ? kSplitTileCosts[index] : kScaledTileCosts[index];
}

}  // namespace epigemm::split
