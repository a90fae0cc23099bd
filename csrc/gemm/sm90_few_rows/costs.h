// What a product with few rows is expected to take. The matrix with many rows is read once, at the memory's speed if
// all multiprocessors have as much to do; beside it, what the busiest one loads and multiplies.
#pragma once

#include "gemm/planner/cost.h"
#include "gemm/sm90_few_rows/tiles.h"

namespace epigemm::sm90_few_rows {

struct TileCost {
  double base_us;
  double of_round_us;      // a further CTA in a multiprocessor's place
  double of_split_us;      // a cluster that shares K
  double bytes_per_cycle;  // that a multiprocessor loads
  double multiply_adds_per_cycle;
};

// Fitted to 35 products on an H200, of 6 to 330 us: off by 7% (rms). The chosen K is at most a tenth slower than the
// fastest, but for one product of 15 us.
constexpr TileCost kTileCosts[] = {
    {4.8, 0.8, 1.4, 33, 61},
    {7.3, 1.7, 0.9, 28, 128},
    {6.0, 3.2, 2.1, 23, 104},
    {7.1, 3.8, 2.1, 30, 60},
};
static_assert(sizeof(kTileCosts) / sizeof(kTileCosts[0]) == kTileCount, "every tile needs its measured cost");

inline double microseconds(const Problem& p, const Plan& plan) {
  constexpr double kShareOfMemory = 0.82;
  using cost::as_double;
  const Tile& tile = kTiles[plan.tile];
  const TileCost& c = kTileCosts[plan.tile];
  const int64_t rows = are_few_of_x(p) ? p.n : p.m;
  const int64_t ctas = ceil_div(rows, tile.many) * plan.splits;
  const int64_t of_one = ceil_div(ctas, p.device.multiprocessors);
  const int64_t places = int64_t(p.device.multiprocessors) * tile.ctas_per_multiprocessor;
  // Of a CTA: whole stages of K are multiplied.
  const double numbers = as_double(tile.many * kStageK * ceil_div(ceil_div(p.k, kStageK), plan.splits));
  const double busiest = as_double(of_one) * numbers *
                         std::max(4 / c.bytes_per_cycle, tile.few / c.multiply_adds_per_cycle) / p.device.clock_mhz;
  const double bytes = 4 * as_double(rows) * as_double(p.k) + cost::matrix_bytes(p);
  const double memory = bytes / (kShareOfMemory * p.device.memory_bytes_per_us);
  return c.base_us + c.of_round_us * as_double(ceil_div(ctas, places) - 1) + (plan.splits > 1 ? c.of_split_us : 0) +
         cost::norm4(busiest, memory);
}

}  // namespace epigemm::sm90_few_rows
