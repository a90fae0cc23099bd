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
  int stages;      // of both operands in shared memory
  int result_kib;  // of shared memory for the epilogue's passes: D on its way out, a matrix on its way in
};

constexpr Tile kTiles[] = {
    // 128 accumulators a thread, the most that registers allow. The cluster's two CTAs along M share the weight tile by
    // multicast. Ahead where K is long and the waves are few.
    {128, 256, 2, 1, Schedule::Cooperative, 4, 32},
    // The same transposed, for grids that it fills better; its two CTAs along N share the x tile.
    {256, 128, 1, 2, Schedule::Cooperative, 4, 32},
    // For grids whose last wave the 128-wide tiles would leave half empty.
    {128, 192, 2, 1, Schedule::Pingpong, 5, 16},
    // Large grids: the rate of the large tiles, with an epilogue that runs under the next tile's mainloop.
    {192, 128, 1, 2, Schedule::Pingpong, 5, 16},
    // The workhorse: nearly the large tiles' rate, and its epilogue runs under the next tile's mainloop. There is room
    // for a whole 16-bit result without a stage less.
    {128, 128, 2, 1, Schedule::Pingpong, 6, 32},
    // M up to 64, where a taller tile computes rows that nobody asked for, and small grids.
    {64, 128, 1, 2, Schedule::Pingpong, 8, 16},
    // 192x128 with room for a whole 16-bit result, at the price of a stage. Ahead where K is short and the epilogue is
    // the time: a warpgroup puts all of its tile on the way, or loads all of a matrix, and never waits in between.
    {192, 128, 1, 2, Schedule::Pingpong, 4, 48},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

// The tile of batch-invariant calls, whatever their M: near the best rate at many rows, and no taller than that needs.
// Another one may change the last bits of results: to users that is a change of behaviour.
constexpr int kInvariantTile = 4;
static_assert(kTiles[kInvariantTile].m == 128 && kTiles[kInvariantTile].n == 128, "the 128x128 tile");

constexpr int kTileKBytes = 128;

}  // namespace epigemm::sm90_tma
