// The swap-AB kernels: few rows of x, or few tiles, whose K a cluster of CTAs shares.
#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90/kernel_names.h"
#include "gemm/sm90_swap_ab/costs.h"
#include "gemm/text.h"

namespace epigemm::sm90_swap_ab {
namespace {

constexpr int64_t kMostGridRows = 65535;  // CUDA's limit for a grid's second and third axis

// Whether a tile is a candidate: about as tall as M, with a part of K for every CTA, and at most two rounds of CTAs.
// The costs were fitted to such tiles.
bool is_candidate(const Problem& problem, int index, int splits) {
  constexpr int kMostRounds = 2;
  // Tiles of 256 columns with K in eight parts were measured 3 to 15% slower than predicted, because their reduction is
  // long.
  constexpr int kWide = 256;
  const Tile& tile = kTiles[index];
  const bool is_tall_enough = problem.m <= 2 * tile.m || tile.m >= 64;
  const bool is_needed = tile.m == 16 || 2 * problem.m > tile.m;
  const int64_t ctas = ceil_div(problem.m, tile.m) * ceil_div(problem.n, tile.n) * splits;
  const int64_t places =
      int64_t(usable_multiprocessors(splits, problem.device.multiprocessors)) * tile.ctas_per_multiprocessor;
  if (tile.n == kWide && splits == kMostSplits) return false;
  return is_tall_enough && is_needed && splits <= steps_of(problem) && ctas <= kMostRounds * places;
}

class SwapAB final : public Family {
 public:
  bool computes(const Problem& problem) const override {
    return !problem.is_pair && sm90::multiplies_as_stored(problem);
  }

  std::string why_not_on(const Device& device) const override { return sm90::why_not_on(device); }

  std::string why_not(const Problem& problem) const override {
    std::string reason = sm90::why_not_on(problem.device);
    return reason.empty() ? sm90::why_not_addressable(problem) : reason;
  }

  std::string why_not_planned(const Problem& problem, const Plan& plan) const override {
    const Tile& tile = kTiles[plan.tile];
    if (plan.splits > steps_of(problem)) return text("K is too short for ", plan.splits, " splits");
    if (ceil_div(problem.m, tile.m) > kMostGridRows || ceil_div(problem.n, tile.n) > kMostGridRows) {
      return "M or N is too large for a swap-AB tile";
    }
    return std::string();
  }

  std::string why_not_accurate(const Problem& problem, const Plan& plan) const override {
    return sm90::why_sums_are_too_long(problem, plan.splits);
  }

  void for_each_candidate(const Problem& problem, const Visit& visit) const override {
    for (int index = 0; index < kTileCount; ++index) {
      for (int splits = 1; splits <= kMostSplits; splits *= 2) {
        if (!is_candidate(problem, index, splits)) continue;
        const Plan plan{FamilyId::sm90_swap_ab, index, Raster::AlongM, /*swizzle=*/1, splits};
        visit({plan, sm90_swap_ab::microseconds(problem, plan)});
      }
    }
  }

  double microseconds(const Problem& problem, const Plan& plan) const override {
    return sm90_swap_ab::microseconds(problem, plan);
  }

  bool stores() const override { return true; }

  open::KernelNames kernels(const Problem& problem, const Plan& plan) const override {
    static const sm90::TileNames all("sm90_swap_ab", kTileCount);
    open::KernelNames names;
    names.add(all.of(problem.x.element, plan.tile));
    return names;
  }

  int tile_count(const Problem&) const override { return kTileCount; }

  TileText describe(const Problem& problem, int index) const override {
    const Tile& tile = kTiles[index];
    return {tile.m, tile.n, kTileKBytes / element_bytes(problem.x.element), 1, 1, "swap-AB"};
  }

  std::string fingerprint() const override {
    std::string text;
    for (const Tile& tile : kTiles) {
      for (const int number : {tile.m, tile.n, tile.stages, tile.ctas_per_multiprocessor}) {
        text += std::to_string(number) + ",";
      }
    }
    return text;
  }
};

}  // namespace

const Family& family() {
  static const SwapAB family;
  return family;
}

}  // namespace epigemm::sm90_swap_ab
