// The mma.sync kernels in 16 bits and TF32: every GPU since Ampere.
#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "gemm/sm80_mma/costs.h"
#include "gemm/sm90/architecture.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90/kernel_names.h"
#include "gemm/text.h"

namespace epigemm::sm80_mma {
namespace {

constexpr int kSwizzle = 8;
// The tile of batch-invariant calls: the largest tile of which every GPU's multiprocessor can run two CTAs.
constexpr int kInvariantTile = 4, kInvariantTileByElements = 8;
static_assert(kTiles[kInvariantTile].m == 128 && kTiles[kInvariantTile].n == 128);
static_assert(kTiles[kInvariantTileByElements].loads == Loads::Elements);
constexpr int kInvariantTileTF32 = 1;
static_assert(kTilesTF32[kInvariantTileTF32].m == 128 && kTilesTF32[kInvariantTileTF32].n == 128);

Plan plan_of(int index) { return {FamilyId::sm80_mma, index, Raster::AlongM, kSwizzle, /*splits=*/1}; }

bool is_tf32(const Problem& problem) { return element_bytes(problem.x.element) == 4; }

// On Hopper the kernels that load by TMA are faster where they can run.
bool is_left_to_tma(const Problem& problem) { return Sm90::is_of(problem.device) && !problem.is_any_family_offered; }

const Tile& tile_for(const Problem& problem, int index) { return tile_of(element_bytes(problem.x.element), index); }

// Of TF32 there are fewer tiles, all by vectors, as are those of 16 bits with their numbers.
bool is_by_elements(const Plan& plan) { return kTiles[plan.tile].loads == Loads::Elements; }
static_assert(kTileCountTF32 <= kInvariantTileByElements);

class Mma final : public Family {
 public:
  bool computes(const Problem& problem) const override {
    return !problem.is_pair && sm90::multiplies_as_stored(problem);
  }

  // They were compiled, linked and inspected for each of these GPUs, but have run on Hopper alone. There calls choose
  // them for rows that TMA refuses.
  bool is_offered(const Device& device) const override { return Sm90::is_of(device); }

  bool is_prelinked() const override { return false; }

  std::string why_not_on(const Device& device) const override {
    if (Sm80::is_of(device)) return std::string();
    return text("mma.sync kernels exist from compute capability 8.0 (Ampere) on; this device has ",
                device.capability / 10, ".", device.capability % 10);
  }

  std::string why_not(const Problem& problem) const override {
    std::string reason = why_not_on(problem.device);
    if (!reason.empty()) return reason;
    // There are no tiles by elements in TF32, and none for batch-invariant calls on Hopper.
    const bool is_by_vectors_alone = is_tf32(problem) || (problem.is_batch_invariant && is_left_to_tma(problem));
    return is_by_vectors_alone ? sm90::why_not_addressable(problem) : sm90::why_not_matrices(problem);
  }

  std::string why_not_planned(const Problem& problem, const Plan& plan) const override {
    const Tile& tile = tile_for(problem, plan.tile);
    if (plan.splits != 1) return text("splits must be 1 for an mma.sync tile, got ", plan.splits);
    if (tile.shared_bytes() > Sm80::shared_of_cta(problem.device)) {
      return text("the tile needs ", tile.shared_bytes(), " bytes of shared memory; this device has ",
                  Sm80::shared_of_cta(problem.device));
    }
    if (ceil_div(problem.m, tile.m) * ceil_div(problem.n, tile.n) > kLargestExtent) return "there are too many tiles";
    return is_by_elements(plan) ? std::string() : sm90::why_not_whole_vectors(problem);
  }

  bool reads_any_rows(const Plan& plan) const override { return is_by_elements(plan); }

  std::string why_not_accurate(const Problem& problem, const Plan& plan) const override {
    return sm90::why_sums_are_too_long(problem, plan.splits);
  }

  void for_each_candidate(const Problem& problem, const Visit& visit) const override {
    const bool are_vectors_whole = sm90::why_not_whole_vectors(problem).empty();
    if (are_vectors_whole && is_left_to_tma(problem)) return;
    for (int index = 0; index < tile_count(problem); ++index) {
      const Plan plan = plan_of(index);
      if (is_by_elements(plan) == are_vectors_whole || !why_not_planned(problem, plan).empty()) continue;
      visit({plan, sm80_mma::microseconds(problem, plan)});
    }
  }

  double microseconds(const Problem& problem, const Plan& plan) const override {
    return sm80_mma::microseconds(problem, plan);
  }

  Plan invariant_plan(const Problem& problem) const override {
    if (is_left_to_tma(problem)) return {};
    const bool are_vectors_whole = sm90::why_not_whole_vectors(problem).empty();
    if (is_tf32(problem)) return are_vectors_whole ? plan_of(kInvariantTileTF32) : Plan{};
    return plan_of(are_vectors_whole ? kInvariantTile : kInvariantTileByElements);
  }

  open::KernelNames kernels(const Problem& problem, const Plan& plan) const override {
    static const sm90::TileNames all("sm80_mma", kTileCount);
    open::KernelNames names;
    names.add(all.of(problem.x.element, plan.tile));
    return names;
  }

  int tile_count(const Problem& problem) const override { return is_tf32(problem) ? kTileCountTF32 : kTileCount; }

  TileText describe(const Problem& problem, int index) const override {
    const Tile& tile = tile_for(problem, index);
    return {
        tile.m, tile.n, tile.k, 1, 1, tile.loads == Loads::Vectors ? "multistage" : "by elements", tile.shared_bytes()};
  }

  std::string fingerprint() const override {
    std::string text;
    const auto add = [&](const Tile& tile) {
      for (const int number :
           {tile.m, tile.n, tile.k, tile.stages, tile.warps_m, tile.warps_n, static_cast<int>(tile.loads)}) {
        text += std::to_string(number) + ",";
      }
    };
    for (const Tile& tile : kTiles) add(tile);
    for (const Tile& tile : kTilesTF32) add(tile);
    return text;
  }
};

}  // namespace

const Family& family() {
  static const Mma family;
  return family;
}

}  // namespace epigemm::sm80_mma
