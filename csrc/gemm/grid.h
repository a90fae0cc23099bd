// The grid of output tiles, as the cost models see it.
#pragma once

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

}  // namespace epigemm
