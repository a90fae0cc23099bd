// The tiles of fp32 products with few rows, of x or of the weight. Adding one = adding a row here, and its kernel in
// open.cmake. Free of CUDA, so that the planner can read them on a machine without a GPU.
#pragma once

#include "gemm/problem.h"

namespace epigemm::sm90_few_rows {

struct Tile {
  int few, many;  // rows of both matrices
  int threads, ctas_per_multiprocessor;
  int ahead;  // steps of K whose loads are on their way
};

// A warp has four of the many rows: each number of the few, from shared memory, serves four multiply-adds. With 16 few
// rows a lane needs 160 registers, and a CTA takes 48 of the many, so that the few come from L2 less often.
constexpr Tile kTiles[] = {
    {1, 32, 256, 2, 4},
    {4, 32, 256, 2, 4},
    {8, 48, 384, 1, 4},
    {16, 48, 384, 1, 2},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);
constexpr int kMostFew = kTiles[kTileCount - 1].few;

constexpr int kStageK = 512;    // of the few rows, in shared memory
constexpr int kMostSplits = 8;  // CTAs of a cluster, each with its part of K

// Whether the few rows are x's. The other matrix is the one that is read once.
inline bool are_few_of_x(const Problem& p) { return p.m <= p.n; }

}  // namespace epigemm::sm90_few_rows
