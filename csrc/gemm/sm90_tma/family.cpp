// The large tiles, which multiply the tensors themselves.
#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90/kernel_names.h"
#include "gemm/sm90_tma/costs.h"
#include "gemm/text.h"

namespace epigemm::sm90_tma {
namespace {

// One order for all tiles: within 3% of the best of three for shapes of every kind (H100). The grid is not padded.
Plan plan_of(int index) { return {FamilyId::sm90_tma, index, Raster::AlongM, /*swizzle=*/8, /*splits=*/1}; }

int count_of(const Problem& problem) {
  return problem.is_pair ? kPairTileCount : problem.arithmetic == Arithmetic::TF32 ? kTF32TileCount : kTileCount;
}

class Tma final : public Family {
 public:
  bool computes(const Problem& problem) const override {
    return sm90::multiplies_as_stored(problem) && (!problem.is_pair || element_bytes(problem.x.element) == 2);
  }

  std::string why_not_on(const Device& device) const override { return sm90::why_not_on(device); }

  std::string why_not(const Problem& problem) const override {
    std::string reason = sm90::why_not_on(problem.device);
    return reason.empty() ? sm90::why_not_addressable(problem) : reason;
  }

  std::string why_not_planned(const Problem&, const Plan& plan) const override {
    return plan.splits == 1 ? std::string() : text("splits must be 1 for a large tile, got ", plan.splits);
  }

  // A batch-invariant call has no other plan. docs/numerics.md gives the error of its long TF32 sums.
  std::string why_not_accurate(const Problem& problem, const Plan&) const override {
    if (problem.is_batch_invariant) return std::string();
    return sm90::why_sums_are_too_long(problem, /*splits=*/1);
  }

  void for_each_candidate(const Problem& problem, const Visit& visit) const override {
    for (int index = 0; index < count_of(problem); ++index) {
      const Plan plan = plan_of(index);
      visit({plan, sm90_tma::microseconds(problem, plan)});
    }
  }

  double microseconds(const Problem& problem, const Plan& plan) const override {
    return sm90_tma::microseconds(problem, plan);
  }

  Plan invariant_plan(const Problem& problem) const override {
    return problem.is_pair ? Plan{} : plan_of(kInvariantTile);
  }

  int moment_rows(const Problem& problem, const Plan& plan) const override {
    return problem.is_pair ? 0 : tile_of(problem, plan.tile).moment_rows(element_bytes(problem.out.element));
  }

  bool stores() const override { return true; }

  open::KernelNames kernels(const Problem& problem, const Plan& plan) const override {
    static const sm90::TileNames of_tiles("sm90_tma", kTileCount), of_pairs("sm90_tma", kPairTileCount, "_pair");
    open::KernelNames names;
    names.add((problem.is_pair ? of_pairs : of_tiles).of(problem.x.element, plan.tile));
    return names;
  }

  int tile_count(const Problem& problem) const override { return count_of(problem); }

  TileText describe(const Problem& problem, int index) const override {
    const Tile& tile = tile_of(problem, index);
    const char* const transposed = tile.groups() == 1 ? "single transposed" : "cooperative transposed";
    const char* const schedule = tile.transposed ? transposed : schedule_name(tile.schedule);
    return {tile.m, tile.n, kTileKBytes / element_bytes(problem.x.element), tile.cluster_m, tile.cluster_n, schedule};
  }

  std::string fingerprint() const override {
    std::string text;
    for (const Tile& tile : kTiles) {
      for (const int number : {tile.m, tile.n, tile.cluster_m, tile.cluster_n, static_cast<int>(tile.schedule),
                               static_cast<int>(tile.transposed)}) {
        text += std::to_string(number) + ",";
      }
    }
    return text;
  }
};

}  // namespace

const Family& family() {
  static const Tma family;
  return family;
}

}  // namespace epigemm::sm90_tma
