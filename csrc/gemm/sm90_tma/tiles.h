// The tiles for which Hopper kernels exist. Adding one = adding a row here, and its measured cost in costs.h. Free
// of CUTLASS, so that the planner can read them on a machine without a GPU.
#pragma once

#include "gemm/sm90/schedule.h"

namespace epigemm::sm90_tma {

using sm90::Schedule;

struct Tile {
  int m, n;  // output elements of one CTA; K per stage is always 128 bytes, the widest swizzle that TMA has
  int cluster_m, cluster_n;
  Schedule schedule;
  int stages;  // of both operands in shared memory
  int slots;           // of a warpgroup's results in shared memory: passes of the epilogue
  int pass_row_bytes;  // 64 rows of so many bytes are a pass
};

constexpr Tile kTiles[] = {
    {128, 256, 2, 1, Schedule::Cooperative, 4, 3, 64},
    {256, 128, 1, 2, Schedule::Cooperative, 4, 3, 64},
    {128, 192, 2, 1, Schedule::Pingpong, 4, 3, 128},
    {192, 128, 1, 2, Schedule::Pingpong, 4, 3, 128},
    {128, 128, 2, 1, Schedule::Pingpong, 5, 3, 128},
    {64, 128, 1, 2, Schedule::Pingpong, 7, 2, 128},
    {128, 128, 1, 1, Schedule::Cooperative, 5, 2, 128},
    {128, 128, 1, 1, Schedule::Cooperative, 6, 3, 64},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr int kTileKBytes = 128;

}  // namespace epigemm::sm90_tma
