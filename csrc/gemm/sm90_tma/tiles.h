// The tiles for which Hopper kernels exist. Adding one = adding a row here, and its measured cost in costs.h. Free
// of CUTLASS, so that the planner can read them on a machine without a GPU.
#pragma once

#include "gemm/sm90/tile.h"

namespace epigemm::sm90_tma {

using sm90::Schedule;
using sm90::Tile;

constexpr Tile kTiles[] = {
    {128, 256, 2, 1, Schedule::Cooperative, false, 4, 3, 4096},
    {256, 128, 1, 2, Schedule::Cooperative, false, 4, 3, 4096},
    {128, 192, 2, 1, Schedule::Pingpong, false, 5, 2, 4096},
    {128, 192, 2, 1, Schedule::Pingpong, false, 5, 3, 4096},
    {192, 128, 1, 2, Schedule::Pingpong, false, 5, 2, 4096},
    {192, 128, 1, 2, Schedule::Pingpong, false, 5, 3, 4096},
    {192, 128, 1, 2, Schedule::Pingpong, false, 4, 4, 8192},
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 3, 4096},
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    {128, 128, 2, 1, Schedule::Pingpong, false, 5, 3, 8192},
    {144, 256, 1, 1, Schedule::Cooperative, true, 4, 2, 6144},
    {128, 128, 1, 1, Schedule::Cooperative, true, 6, 2, 8192},
    {128, 128, 1, 1, Schedule::Cooperative, false, 6, 2, 8192},
    {96, 256, 1, 1, Schedule::Cooperative, true, 4, 3, 6144},
    {192, 256, 1, 1, Schedule::Cooperative, true, 3, 3, 8192},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

// The tile of batch-invariant calls, whatever their M: near the best rate at many rows, and no taller than that needs.
// Another one may change the last bits of results: to users that is a change of behaviour.
constexpr int kInvariantTile = 7;
static_assert(kTiles[kInvariantTile].m == 128 && kTiles[kInvariantTile].n == 128, "the 128x128 tile");

constexpr int kTileKBytes = sm90::kStageRowBytes;

}  // namespace epigemm::sm90_tma
