// How the K of a tile is divided among CTAs, and the workspace of their sums. Plain C++.
#pragma once

#include "gemm/grid.h"
#include "gemm/sm80_mma/inputs.h"

namespace epigemm::sm80_mma {

constexpr int kMostSplits = 8;  // of a forced plan (call/forced.cpp)

// Bytes of a workspace of sums: 64 MiB. The planner's candidates, whose CTAs are about as many as run at once, seldom
// need half of it.
constexpr int64_t kMostBytesOfSums = int64_t(64) << 20;

// K is divided in units: a stage, or with two slices the two stages that share a block of memory.
constexpr int columns_of_unit(const Tile& tile) { return tile.slices * tile.columns(); }
inline int64_t units_of(const Problem& problem, const Tile& tile) { return ceil_div(problem.k, columns_of_unit(tile)); }

inline int64_t tiles_of(const Problem& problem, const Tile& tile) {
  return ceil_div(problem.m, tile.m) * ceil_div(problem.n, tile.n);
}

// The workspace has a counter of each tile, then the sums of every tile and share.
inline int64_t counter_bytes(const Problem& problem, const Tile& tile) {
  constexpr int64_t kSection = 256;
  return round_up(4 * tiles_of(problem, tile), kSection);
}
inline int64_t bytes_of_sums(const Problem& problem, const Plan& plan) {
  const Tile& tile = tile_of(problem, plan.tile);
  return plan.splits * tiles_of(problem, tile) * 4 * tile.m * tile.n;
}

// 0 where K is not divided.
inline int64_t split_workspace_bytes(const Problem& problem, const Plan& plan) {
  if (plan.splits == 1) return 0;
  return counter_bytes(problem, tile_of(problem, plan.tile)) + bytes_of_sums(problem, plan);
}

}  // namespace epigemm::sm80_mma
