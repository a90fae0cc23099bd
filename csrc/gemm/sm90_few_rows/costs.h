// What a product with few rows is expected to take. The matrix with many rows is read once, at the memory's speed if
// all multiprocessors have as much to do; beside it, what the busiest one loads and multiplies.
#pragma once

#include "gemm/planner/cost.h"
#include "gemm/sm90_few_rows/tiles.h"

namespace epigemm::sm90_few_rows {

inline double microseconds(const Problem& p, const Plan& plan) {
  constexpr double kBaseUs = 4.0, kOfRoundUs = 1.5, kShareOfMemory = 0.86, kBytesPerCycle = 40, kLanes = 128 * 0.8;
  using cost::as_double;
  const Tile& tile = kTiles[plan.tile];
  const int64_t rows = are_few_of_x(p) ? p.n : p.m;
  const int64_t ctas = ceil_div(rows, tile.many) * plan.splits;
  const int64_t of_one = ceil_div(ctas, p.device.multiprocessors);
  const int64_t places = int64_t(p.device.multiprocessors) * tile.ctas_per_multiprocessor;
  // Of a CTA: whole stages of K are multiplied.
  const double numbers = as_double(tile.many * kStageK * ceil_div(ceil_div(p.k, kStageK), plan.splits));
  const double busiest =
      as_double(of_one) * numbers * std::max(4 / kBytesPerCycle, tile.few / kLanes) / p.device.clock_mhz;
  const double bytes = 4 * as_double(rows) * as_double(p.k) + cost::matrix_bytes(p);
  const double memory = bytes / (kShareOfMemory * p.device.memory_bytes_per_us);
  return kBaseUs + kOfRoundUs * as_double(ceil_div(ctas, places) - 1) + cost::norm4(busiest, memory);
}

}  // namespace epigemm::sm90_few_rows
