// What the cost model knows of each narrow tile: fitted to plan sweeps on an H200 (docs/performance.md). Apart from
// tiles.h, so that a new measurement recompiles dispatch alone.
#pragma once

#include "gemm/narrow/tiles.h"

namespace epigemm::narrow {

struct TileCost {
  double stage_microseconds;   // of one CTA that has its multiprocessor to itself, if its bytes come in time
  double finish_microseconds;  // reduction, epilogue and store
};

struct TileCosts {
  TileCost in_16_bits, in_tf32;
};

// In the order of kTiles.
constexpr TileCosts kTileCosts[] = {
    {{0.15, 1.2}, {0.15, 1.2}},  // 16x64
    {{0.20, 1.5}, {0.20, 1.5}},  // 16x128
    {{0.16, 1.2}, {0.16, 1.2}},  // 32x64
    {{0.18, 1.3}, {0.18, 1.3}},  // 64x64
    {{0.24, 1.5}, {0.24, 1.5}},  // 64x128
    {{0.35, 2.0}, {0.35, 2.0}},  // 128x128
    {{0.40, 2.0}, {0.40, 2.0}},  // 64x256
    {{0.60, 3.0}, {0.60, 3.0}},  // 128x256
};

static_assert(sizeof(kTileCosts) / sizeof(kTileCosts[0]) == kTileCount, "every tile needs its measured cost");

}  // namespace epigemm::narrow
