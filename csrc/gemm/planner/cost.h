// What the cost models share. Plain C++. Times are in microseconds unless a name says cycles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/grid.h"
#include "gemm/problem.h"

namespace epigemm::cost {

inline double as_double(int64_t number) { return static_cast<double>(number); }

// Close to the largest, and more where they are alike: what limits together takes longer than each limit alone. Fourth
// powers, for two square roots are an order cheaper than a general power.
inline double norm4(double a, double b, double c = 0) {
  a *= a, b *= b, c *= c;
  return std::sqrt(std::sqrt(a * a + b * b + c * c));
}

// How rows of so many bytes lie in L2's lines of 128: a stage of K that straddles two of them costs L2 more. 0: whole
// lines, 1: halves, 2: quarters, 3: less.
inline int alignment_class(int64_t row_bytes) {
  return row_bytes % 128 == 0 ? 0 : row_bytes % 64 == 0 ? 1 : row_bytes % 32 == 0 ? 2 : 3;
}

// Device memory's bytes a clock cycle of the multiprocessors.
inline double memory_bytes_per_cycle(const Device& device) { return device.memory_bytes_per_us / device.clock_mhz; }

inline bool is_transcendental(const Problem& problem) { return epilogue_info(problem.epilogue).is_transcendental; }

// The rounds in which a persistent kernel goes through its clusters of tiles, padding included.
struct Rounds {
  double count;   // the last one included
  double last;    // the share of the places that the last round takes
  double places;  // clusters at work at once
};

inline Rounds rounds_of(const Grid& grid, int swizzle, int ctas_per_cluster, int multiprocessors) {
  const int64_t places = std::max<int64_t>(1, multiprocessors / ctas_per_cluster);
  const int64_t clusters = round_up(grid.clusters_m, swizzle) * round_up(grid.clusters_n, swizzle);
  const int64_t count = std::max<int64_t>(1, ceil_div(clusters, places));
  return {as_double(count), as_double(clusters - (count - 1) * places) / as_double(places), as_double(places)};
}

}  // namespace epigemm::cost
