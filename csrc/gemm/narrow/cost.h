// What a narrow kernel is expected to take: fitted to a sweep over 56 shapes on an H200, bf16 and TF32
// (docs/performance.md). The mean error is 5%; where it picks another plan than the fastest, 2% are lost on average.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm/grid.h"
#include "gemm/narrow/tiles.h"

namespace epigemm::narrow {

struct TileCost {
  double stage_microseconds;  // of a CTA that has its multiprocessor to itself
  double fixed_microseconds;  // until the first stage is there, and from the last one to the stored result
};

// In the order of kTiles.
constexpr TileCost kTileCosts[] = {
    {0.115, 5.37},  // 16x64
    {0.193, 5.53},  // 16x128
    {0.128, 5.50},  // 32x64: between its neighbours
    {0.143, 5.63},  // 64x64
    {0.185, 6.71},  // 64x128
    {0.306, 7.80},  // 128x128
    {0.329, 8.03},  // 64x256
    {0.624, 9.39},  // 128x256
};
static_assert(sizeof(kTileCosts) / sizeof(kTileCosts[0]) == kTileCount, "every tile needs its measured cost");

// The multiprocessors that clusters of so many CTAs can use: a cluster lies in one part of the chip, whose numbers of
// multiprocessors its size does not divide.
inline int usable_multiprocessors(int splits, int multiprocessors) {
  return splits > 2 ? multiprocessors * 10 / 11 : multiprocessors;
}

// Whether all CTAs of a plan find a place at once: what the kernels are for, and what their costs were fitted to. Large
// tiles are faster where there are more.
inline bool all_at_once(int index, int splits, int64_t m, int64_t n, int multiprocessors) {
  const Tile& tile = kTiles[index];
  const int64_t places = int64_t(usable_multiprocessors(splits, multiprocessors)) * tile.ctas_per_multiprocessor;
  return ceil_div(m, tile.m) * ceil_div(n, tile.n) * splits <= places;
}

// `steps`: stages along K. `traffic_microseconds`: what the operands and the result take at the memory's full speed.
inline double microseconds(int index, int splits, int64_t m, int64_t n, int64_t steps, double traffic_microseconds,
                           int multiprocessors) {
  constexpr double kReduction = 0.8;
  const Tile& tile = kTiles[index];
  const int64_t ctas = ceil_div(m, tile.m) * ceil_div(n, tile.n) * splits;
  const int usable = std::max(1, usable_multiprocessors(splits, multiprocessors));
  const int64_t sharing = std::min<int64_t>(tile.ctas_per_multiprocessor, ceil_div(ctas, usable));
  const double walk = static_cast<double>(sharing * ceil_div(steps, splits)) * kTileCosts[index].stage_microseconds;
  // Close to the larger of the two, and more where they are alike.
  const double body = std::sqrt(std::sqrt(std::pow(walk, 4) + std::pow(traffic_microseconds, 4)));
  return kTileCosts[index].fixed_microseconds + (splits > 1 ? kReduction : 0) + body;
}

}  // namespace epigemm::narrow
