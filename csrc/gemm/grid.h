// The grid of output tiles, as the cost models see it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace epigemm {

// The kernels' problem shape is 32-bit, and they round it up to whole tiles.
constexpr int64_t kLargestExtent = std::numeric_limits<int32_t>::max() - 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Grid {
  int64_t clusters_m, clusters_n;
  int64_t clusters() const { return clusters_m * clusters_n; }
};

// How often a persistent kernel goes round until every tile is done.
inline int64_t waves(int64_t clusters, int ctas_per_cluster, int multiprocessors) {
  return ceil_div(clusters * ctas_per_cluster, std::max(1, multiprocessors));
}

// A strip of `swizzle` clusters is walked across before the kernel moves on, so that the operands of a wave stay in L2:
// the wider the better. But on fp16 slices CUTLASS pads the grid to whole strips along *both* axes, and a padded tile
// costs as much as a real one (at M = 1024 a strip of 8 doubles the work of 128-row tiles), so take the widest that
// pads next to nothing.
inline bool pads_next_to_nothing(const Grid& grid, int swizzle, int ctas_per_cluster, int multiprocessors) {
  constexpr double kMostPadding = 1.04;
  const int64_t padded = round_up(grid.clusters_m, swizzle) * round_up(grid.clusters_n, swizzle);
  return static_cast<double>(padded) <= kMostPadding * static_cast<double>(grid.clusters()) &&
         waves(padded, ctas_per_cluster, multiprocessors) == waves(grid.clusters(), ctas_per_cluster, multiprocessors);
}

inline int choose_swizzle(const Grid& grid, int ctas_per_cluster, int multiprocessors) {
  for (int swizzle = 8; swizzle > 1; swizzle /= 2) {
    if (pads_next_to_nothing(grid, swizzle, ctas_per_cluster, multiprocessors)) return swizzle;
  }
  return 1;
}

}  // namespace epigemm
