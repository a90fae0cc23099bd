// What the cost model knows of each tile: fitted to plan sweeps on an H200 (16 shapes, 5 epilogues;
// docs/performance.md). Apart from tiles.h, so that a new measurement recompiles dispatch alone.
#pragma once

#include "gemm/sm90/tiles.h"

namespace epigemm::sm90 {

struct TileCost {
  double
      products_per_microsecond;  // millions of multiply-adds of one multiprocessor in the mainloop, at sustained clocks
  double epilogue_microseconds;  // what the epilogue adds to each tile beyond what the schedule hides
};

struct TileCosts {
  TileCost in_16_bits, in_tf32;
};

// In the order of kTiles.
constexpr TileCosts kTileCosts[] = {
    {{2.96, 2.60}, {1.55, 2.91}},  // 128x256 2x1 cooperative
    {{2.96, 2.66}, {1.56, 3.08}},  // 256x128 1x2 cooperative
    {{2.98, 1.52}, {1.49, 0.63}},  // 128x192 2x1 pingpong
    {{2.98, 1.30}, {1.49, 0.60}},  // 192x128 1x2 pingpong
    {{2.94, 1.10}, {1.52, 0.45}},  // 128x128 2x1 pingpong
    {{1.85, 0.09}, {0.87, 0.00}},  // 64x128 1x2 pingpong
};

static_assert(sizeof(kTileCosts) / sizeof(kTileCosts[0]) == kTileCount, "every tile needs its measured cost");

}  // namespace epigemm::sm90
