// The tiles of the fp32 kernels on fp16 slices. Adding one = adding a row here, and its measured cost in costs.h.
// Free of CUTLASS, so that the planner can read them on a machine without a GPU.
#pragma once

#include "gemm/problem.h"
#include "gemm/sm90/tile.h"

namespace epigemm::sm90_fp16x3 {

using sm90::Schedule;
using sm90::Tile;

// As many stages as leave an epilogue with a few vectors two slots or more.
//
// Three products, three accumulators: 64 registers each is the most that fits two warpgroups. (Pingpong schedules, one
// warpgroup a tile, were measured 3 to 7% slower: nothing overlaps a warpgroup's waits within a tile.)
constexpr Tile kSplitTiles[] = {
    // The most used tile; the cluster's CTAs along M share the weight's slices by multicast.
    {128, 128, 2, 1, Schedule::Cooperative, false, 3, 3, 4096},
    // M up to 128 and small grids: twice the tiles for twice the multiprocessors.
    {128, 64, 1, 2, Schedule::Cooperative, false, 4, 2, 8192},
    // M up to 64: the weight is read at the memory's speed.
    {64, 128, 1, 1, Schedule::Cooperative, true, 4, 2, 8192},
    // M up to 16: x's slices need less memory, so there are more stages.
    {16, 128, 1, 1, Schedule::Cooperative, true, 6, 2, 2048},
};

// One product, like a 16-bit GEMM with fp32 results.
constexpr Tile kScaledTiles[] = {
    {128, 256, 2, 1, Schedule::Cooperative, false, 4, 3, 4096},
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 3, 4096},
    {64, 128, 1, 2, Schedule::Pingpong, false, 8, 3, 4096},
};

// The same with the weight as it lies (as_it_lies_mainloop.h): `m` rows of x are the kernel's columns. They come behind
// the others in the numbers of an arithmetic's tiles.
constexpr Tile kAsItLiesSplitTiles[] = {
    {128, 128, 1, 1, Schedule::Cooperative, true, 3, 2, 4096},
    {64, 128, 1, 1, Schedule::Cooperative, true, 4, 2, 4096},
    {32, 128, 1, 1, Schedule::Cooperative, true, 5, 2, 4096},
    {16, 128, 1, 1, Schedule::Cooperative, true, 6, 2, 2048},
};

constexpr Tile kAsItLiesScaledTiles[] = {
    {256, 128, 1, 1, Schedule::Cooperative, true, 3, 2, 4096},
    {128, 128, 1, 1, Schedule::Cooperative, true, 4, 2, 4096},
    {64, 128, 1, 1, Schedule::Cooperative, true, 5, 2, 4096},
    {16, 128, 1, 1, Schedule::Cooperative, true, 6, 2, 2048},
};

// Those of rows in groups, among each of the two: as few kernels as lose little. With 32 rows of x the weights take as
// long to be read as with 64.
constexpr int kGroupedSplitTiles[] = {0, 1, 3}, kGroupedScaledTiles[] = {1, 2, 3};
constexpr int kGroupedTileCount = sizeof(kGroupedSplitTiles) / sizeof(kGroupedSplitTiles[0]);
static_assert(sizeof(kGroupedSplitTiles) == sizeof(kGroupedScaledTiles));

constexpr int grouped_tile(Arithmetic arithmetic, int index) {
  return arithmetic == Arithmetic::Split ? kGroupedSplitTiles[index] : kGroupedScaledTiles[index];
}

// Which of them a tile that reads the weight as it lies is; -1: none.
constexpr int index_in_groups(Arithmetic arithmetic, int tile) {
  for (int index = 0; index < kGroupedTileCount; ++index) {
    if (grouped_tile(arithmetic, index) == tile) return index;
  }
  return -1;
}

constexpr int kSplitTileCount = sizeof(kSplitTiles) / sizeof(kSplitTiles[0]);
constexpr int kScaledTileCount = sizeof(kScaledTiles) / sizeof(kScaledTiles[0]);
constexpr int kAsItLiesSplitTileCount = sizeof(kAsItLiesSplitTiles) / sizeof(kAsItLiesSplitTiles[0]);
constexpr int kAsItLiesScaledTileCount = sizeof(kAsItLiesScaledTiles) / sizeof(kAsItLiesScaledTiles[0]);

// The tiles whose kernels read slices of the weight.
constexpr int sliced_tile_count(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::Split ? kSplitTileCount : kScaledTileCount;
}

constexpr bool is_as_it_lies(Arithmetic arithmetic, int index) { return index >= sliced_tile_count(arithmetic); }

constexpr int tile_count(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::Split ? kSplitTileCount + kAsItLiesSplitTileCount
                                         : kScaledTileCount + kAsItLiesScaledTileCount;
}

constexpr const Tile& tile_of(Arithmetic arithmetic, int index) {
  const bool is_split = arithmetic == Arithmetic::Split;
  if (!is_as_it_lies(arithmetic, index)) return is_split ? kSplitTiles[index] : kScaledTiles[index];
  const int behind = index - sliced_tile_count(arithmetic);
  return is_split ? kAsItLiesSplitTiles[behind] : kAsItLiesScaledTiles[behind];
}

// Whether CTAs may share the K of a tile with the weight as it lies (sm90/share_of_k.cuh). With more sums than 64 a
// thread some would be spilled.
constexpr bool may_share_k(const Tile& tile) { return tile.m <= 128; }

// The tile of batch-invariant calls, whatever their M (see sm90_tma::kInvariantTile).
constexpr int invariant_tile(Arithmetic arithmetic) { return arithmetic == Arithmetic::Split ? 0 : 1; }
static_assert(kSplitTiles[0].m == 128 && kSplitTiles[0].n == 128, "the 128x128 tile");
static_assert(kScaledTiles[1].m == 128 && kScaledTiles[1].n == 128, "the 128x128 tile");

constexpr int kTileK = sm90::kStageRowBytes / 2;  // fp16 elements of one stage

}  // namespace epigemm::sm90_fp16x3
