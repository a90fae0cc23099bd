// The tiles of the swap-AB kernels, for products with few rows or few tiles. Adding one = adding a row here, and its
// measured cost in costs.h. Free of CUTLASS, so that the planner can read them on a machine without a GPU.
#pragma once

#include "gemm/sm90/architecture.h"

namespace epigemm::sm90_swap_ab {

struct Tile {
  int m, n;    // output elements of one cluster: rows of x, rows of the weight
  int stages;  // of 128 bytes along K each, the widest swizzle that TMA has
  int ctas_per_multiprocessor;
};

constexpr Tile kTiles[] = {
    // M up to 16: the weight is read once, and no unneeded rows are computed. Two CTAs on a multiprocessor: one loads
    // while the other reduces.
    {16, 64, 10, 2},
    // The same for weights with many rows, whose 64-row tiles would not all run at once.
    {16, 128, 6, 2},
    // M up to 32.
    {32, 64, 8, 2},
    // M up to 64, and few tiles: one CTA, with as many loads at once as fit in shared memory.
    {64, 64, 12, 1},
    // For more rows and larger weights: the more a CTA computes per load, the fewer bytes come from L2.
    {64, 128, 8, 1},
    {128, 128, 6, 1},
    {64, 256, 5, 1},
    {128, 256, 4, 1},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

// CTAs of a cluster, each with its part of K.
constexpr int kMostSplits = Sm90::kMostClusterCtas;

constexpr int kTileKBytes = 128;

}  // namespace epigemm::sm90_swap_ab
