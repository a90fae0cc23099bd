// What planners have to know of CTAs that share the K of a tile (share_of_k.cuh). Free of CUTLASS.
#pragma once

#include <cstdint>
#include <string>

#include "gemm/grid.h"
#include "gemm/sm90/tile.h"
#include "gemm/text.h"

namespace epigemm::sm90 {

constexpr int kSplits[] = {1, 2, 4, 8};  // CTAs that may share a tile

// Whether all clusters of so many CTAs run at once. An H200 of 132 multiprocessors has room for 66 of two, 30 of four
// and 15 of eight.
inline bool run_at_once(int64_t clusters, int ctas, int multiprocessors) {
  return 11 * clusters * ctas <= (ctas > 2 ? 10 : 11) * multiprocessors;
}

// What it takes until the leader has the sums of all CTAs that share the K of a tile: fitted in sm90_fp16x3.
inline double gather_us(const Tile& tile, int splits) {
  constexpr double kFixed = 1.5, kBytesPerUs = 40e3;
  return splits == 1 ? 0 : kFixed + (splits - 1) * static_cast<double>(4 * tile.m * tile.n) / kBytesPerUs;
}

// Why so many CTAs cannot share K, in stages of `stage`; empty if they can.
inline std::string why_not_shared(int64_t k, int stage, int splits) {
  if (ceil_div(k, stage) >= splits) return {};
  return text("K = ", k, " has fewer stages of ", stage, " than the ", splits, " CTAs that share it");
}

}  // namespace epigemm::sm90
