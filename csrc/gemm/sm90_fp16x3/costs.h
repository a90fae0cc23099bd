// What a call on fp16 slices is expected to take: the split of x, the GEMM and the range check. Fitted to random
// shapes on an H200 and an H100 (docs/internals.md), when these tiles had CUTLASS's epilogue; the median error was 3%
// (fp16x3) and 5% (fp16x1). Apart from tiles.h, so that new figures recompile the planner alone.
#pragma once

#include <algorithm>

#include "gemm/fp16_slices/costs.h"
#include "gemm/planner/cost.h"
#include "gemm/sm90/shares.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

using fp16_slices::kFittedClockMhz;
using fp16_slices::kRootsMicroseconds;
using fp16_slices::slice_bytes;
using fp16_slices::split_microseconds;
using fp16_slices::weight_split_microseconds;

constexpr double kMB = 1e-6;

struct TileCost {
  double step_us;      // one stage of K of one tile, if its slices are loaded in time
  double epilogue_us;  // of one tile
  double fixed_us;     // until the first stage is loaded, and after the last one
  double wide_us;      // additional time if many rows are split, because the GEMM then starts later
  // What the epilogue of one tile takes longer for statistics of D's columns, and for second values: fitted to times of
  // every tile on an H100 at up to seven shapes (K from 1024 to 4096), over those without.
  double column_moments_us, store_us;
};

constexpr TileCost kSplitTileCosts[] = {
    {1.05, 3.09, 3.80, 3.93, 1.4, 1.45},    // 128x128 2x1
    {0.582, 1.89, 3.31, 2.74, 0.6, 0.8},    // 128x64 1x2
    {0.576, 0.925, 3.50, 0.00, 1.0, 0.5},   // 64x128 transposed
    {0.365, 3.84, 0.158, 0.00, 0.2, 0.05},  // 16x128 transposed
};

constexpr TileCost kScaledTileCosts[] = {
    {0.746, 4.10, 5.36, 4.46, 3.05, 2.2},   // 128x256 2x1 cooperative
    {0.441, 6.58, 1.52, 3.97, 4.35, 2.55},  // 128x128 2x1 pingpong
    {0.296, 4.52, 1.90, 3.54, 0.5, 0.05},   // 64x128 1x2 pingpong
};

// With the weight as it lies: fitted to times of every tile at five to 23 problems each (1 to 16384 rows, N and K of
// 1024 to 32768) on an H200; off by 1 to 10% of them, root mean square. At 33 problems at which CTAs share K (16 to
// 1024 rows, transposed weights among them) the chosen plan was the fastest of those timed, or 2% slower, but once.
// Those of statistics and second values are of the tiles on slices.
constexpr TileCost kAsItLiesSplitTileCosts[] = {
    {1.27, 8.0, 11.0, 0, 1.4, 1.45},  // 128x128
    {0.97, 0.5, 11.0, 0, 1.0, 0.8},   // 64x128
    {0.69, 4.0, 11.0, 0, 1.0, 0.5},   // 32x128
    {0.59, 8.0, 7.0, 0, 0.2, 0.05},   // 16x128
};

constexpr TileCost kAsItLiesScaledTileCosts[] = {
    {0.91, 4.0, 11.0, 0, 3.05, 2.2},  // 256x128
    {0.62, 4.0, 3.5, 0, 3.05, 2.2},   // 128x128
    {0.62, 0.5, 3.5, 0, 1.0, 0.5},    // 64x128
    {0.46, 0.5, 3.5, 0, 0.2, 0.05},   // 16x128
};

static_assert(sizeof(kAsItLiesSplitTileCosts) / sizeof(TileCost) == kAsItLiesSplitTileCount &&
                  sizeof(kAsItLiesScaledTileCosts) / sizeof(TileCost) == kAsItLiesScaledTileCount,
              "every tile needs its cost");
static_assert(sizeof(kSplitTileCosts) / sizeof(TileCost) == kSplitTileCount, "every tile needs its measured cost");
static_assert(sizeof(kScaledTileCosts) / sizeof(TileCost) == kScaledTileCount, "every tile needs its measured cost");

inline const TileCost& cost_of(Arithmetic arithmetic, int index) {
  const bool is_split = arithmetic == Arithmetic::Split;
  if (!is_as_it_lies(arithmetic, index)) return is_split ? kSplitTileCosts[index] : kScaledTileCosts[index];
  const int behind = index - sliced_tile_count(arithmetic);
  return is_split ? kAsItLiesSplitTileCosts[behind] : kAsItLiesScaledTileCosts[behind];
}

// Figures that the tiles of an arithmetic share.
struct SharedCost {
  double base_us;
  double l2_bandwidth;       // MB a microsecond, of all multiprocessors together
  double cluster_bandwidth;  // what one cluster can load
  double throttling;         // sustained load lowers the clocks: by up to this share,
  double half_throttled_us;  // half of it from such a time on
  double memory_factor;      // the memory's time over that of a copy
  double idle_speedup;       // how much faster a step is if nearly all other multiprocessors are idle
  double l2_mb;              // the part of one operand that stays in L2 while the other one is read
  double split_share;        // the share of the split's time that the GEMM does not hide
  double absorbed_mb;        // the part of x's slices that need not be read from memory
};

constexpr SharedCost kSplitCost = {0.226, 39.7, 10.0, 0.113, 6490, 1.08, 0.304, 14.5, 0.925, 0.202};
constexpr SharedCost kScaledCost = {1.56, 22.4, 12.1, 0, 1, 1.20, 0.427, 12.1, 0.983, 0};

inline Grid grid_of(const Problem& p, const Tile& tile) {
  return {ceil_div(ceil_div(p.m, tile.m), tile.cluster_m), ceil_div(ceil_div(p.n, tile.n), tile.cluster_n)};
}

// The part of an operand that does not fit in L2 is read from memory again for every strip of tiles.
inline double reread_mb(const Grid& grid, const Plan& plan, double places, double x_mb, double weight_mb,
                        double l2_mb) {
  const bool along_m = plan.raster == Raster::AlongM;
  const double walked = along_m ? x_mb : weight_mb;
  const double across = cost::as_double(along_m ? grid.clusters_n : grid.clusters_m);
  const double along = cost::as_double(along_m ? grid.clusters_m : grid.clusters_n);
  const double passes = across / std::max<double>(plan.swizzle, places / along);
  return std::max(passes - 1, 0.0) * std::max(walked - l2_mb, 0.0);
}

// What results beside the result add to the epilogue of one tile.
inline double beside_us(const Problem& p, const TileCost& of_tile) {
  return (p.has_column_moments ? of_tile.column_moments_us : 0) +
         (epilogue_info(p.epilogue).has_store ? of_tile.store_us : 0);
}

// The whole call: split of x (and of a weight that is not packed), GEMM, range check.
inline double microseconds_of_one(const Problem& p, const Plan& plan) {
  constexpr int64_t kManyRows = 264, kShortK = 256;
  using cost::as_double;
  const bool is_split = p.arithmetic == Arithmetic::Split;
  const Tile& tile = tile_of(p.arithmetic, plan.tile);
  const bool reads_weight = is_as_it_lies(p.arithmetic, plan.tile);
  const TileCost& of_tile = cost_of(p.arithmetic, plan.tile);
  const SharedCost& shared = is_split ? kSplitCost : kScaledCost;
  const double m = as_double(p.m), n = as_double(p.n), k = as_double(p.k);
  const double slowdown = kFittedClockMhz / p.device.clock_mhz;
  const int bytes = slice_bytes(p.arithmetic), weight_bytes = reads_weight ? 4 : bytes;

  const Grid grid = grid_of(p, tile);
  const cost::Rounds rounds = cost::rounds_of({grid.clusters_m * plan.splits, grid.clusters_n},
                                              tile.cluster_m * tile.cluster_n, p.device.multiprocessors);
  // What a cluster loads for one stage of K, on average: tiles at the edges load less.
  const double load =
      kMB * kTileK * (bytes * m / as_double(grid.clusters_m) + weight_bytes * n / as_double(grid.clusters_n));
  // `share`: of the places that are busy.
  const auto step = [&](double share) {
    const double mma = slowdown * of_tile.step_us * (1 - shared.idle_speedup * (1 - share));
    return cost::norm4(mma, load * share * rounds.places / shared.l2_bandwidth, load / shared.cluster_bandwidth);
  };
  const double steps = as_double(ceil_div(ceil_div(p.k, kTileK), plan.splits));
  const double mainloops = steps * ((rounds.count - 1) * step(1) + step(rounds.last));
  // One figure for both classes.
  const auto kernel = tile.schedule == Schedule::Pingpong ? FunctorKernel::Pingpong : FunctorKernel::Slices;
  const double longer = cost::longer_functor_cycles(p, kernel, tile.m * tile.n, true);
  const double epilogue =
      slowdown * (of_tile.epilogue_us + beside_us(p, of_tile) + sm90::gather_us(tile, plan.splits)) +
      longer / p.device.clock_mhz;
  const double one_hidden = std::max(mainloops + epilogue, (mainloops + rounds.count * epilogue) / 2);
  double compute = tile.schedule == Schedule::Pingpong ? one_hidden : mainloops + rounds.count * epilogue;
  compute *= 1 + shared.throttling * compute / (compute + shared.half_throttled_us);

  const double x_mb = kMB * bytes * m * k, weight_mb = kMB * weight_bytes * n * k;
  const double again = reread_mb(grid, plan, rounds.places / plan.splits, x_mb, weight_mb, shared.l2_mb);
  const double read_mb = kMB * cost::matrix_bytes(p), read_last_mb = read_mb / rounds.count;
  const double memory_mb = x_mb - std::min(x_mb, shared.absorbed_mb) + weight_mb +
                           kMB * 4 * m * n * cost::written_matrices(p) + again + (read_mb - read_last_mb);
  const double memory = shared.memory_factor * memory_mb / (kMB * p.device.memory_bytes_per_us);

  double us = shared.base_us + shared.split_share * split_microseconds(p, p.m) + of_tile.fixed_us +
              cost::norm4(compute, memory) + read_last_mb / (kMB * p.device.memory_bytes_per_us);
  if (p.m > kManyRows && p.k > kShortK) us += of_tile.wide_us;
  if (reads_weight) return us + kRootsMicroseconds;
  return us + (p.is_packed ? 0 : weight_split_microseconds(p));
}

// Rows in groups: as one product of as many whole tiles as groups need whose last one is half full, but at least the
// time in which all groups' weights are read (sm90_tma/costs.h). Not measured yet.
inline double microseconds(const Problem& p, const Plan& plan) {
  if (!p.groups) return microseconds_of_one(p, plan);
  using cost::as_double;
  const Tile& tile = tile_of(p.arithmetic, plan.tile);
  const SharedCost& shared = p.arithmetic == Arithmetic::Split ? kSplitCost : kScaledCost;
  const int64_t rows = ceil_div(p.m, p.groups.count);
  Problem one = p;
  one.groups = {};
  one.m = p.groups.count * (p.groups.are_alike ? round_up(rows, tile.m) : std::max<int64_t>(tile.m, rows + tile.m / 2));
  const double split_us = shared.split_share * (split_microseconds(one, one.m) - split_microseconds(p, p.m));
  const double bytes = 4 * as_double(p.groups.count) * as_double(p.n) * as_double(p.k);
  return std::max(microseconds_of_one(one, plan) - split_us,
                  shared.base_us + shared.memory_factor * bytes / p.device.memory_bytes_per_us);
}

}  // namespace epigemm::sm90_fp16x3
