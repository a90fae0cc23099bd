// The mma.sync kernels in 16 bits, TF32, and fp32 on fp16 slices: every GPU since Ampere.
#include <iterator>

#include "gemm/fp16_slices/coverage.h"
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
constexpr int kInvariantTileSplit = 0, kInvariantTileScaled = 1;
static_assert(kTilesSplit[kInvariantTileSplit].m == 128 && kTilesSplit[kInvariantTileSplit].n == 128);
static_assert(kTilesScaled[kInvariantTileScaled].m == 128 && kTilesScaled[kInvariantTileScaled].n == 128);

Plan plan_of(int index, int splits = 1) { return {FamilyId::sm80_mma, index, Raster::AlongM, kSwizzle, splits}; }

bool is_tf32(const Problem& problem) { return inputs_of(problem) == Inputs::TF32; }

// Slices are our own: their rows are whole 16 bytes.
bool has_whole_vectors(const Problem& problem) {
  return is_on_slices(problem.arithmetic) || sm90::why_not_whole_vectors(problem).empty();
}

// On Hopper the kernels that load by TMA are faster where they can run.
bool is_left_to_tma(const Problem& problem) { return Sm90::is_of(problem.device) && !problem.is_any_family_offered; }

// Whether it may be worth while that several CTAs share the K of a tile: half as many would not fill the GPU. With
// eight shares the last CTA's additions take longest, which the tile for few rows has the fewest of.
bool is_split_needed(const Problem& problem, const Plan& plan) {
  constexpr int kFewRows = 16, kSplitsOfOthers = 4;
  const Tile& tile = tile_of(problem, plan.tile);
  const int64_t places = int64_t(problem.device.multiprocessors) * ctas_per_multiprocessor(tile, problem.device);
  if (plan.splits > kSplitsOfOthers && tile.m > kFewRows) return false;
  return tiles_of(problem, tile) * plan.splits / 2 < places;
}

// Why K cannot be divided as the plan has it; empty if it can.
std::string why_not_split(const Problem& problem, const Plan& plan) {
  const Tile& tile = tile_of(problem, plan.tile);
  if (plan.splits == 1) return std::string();
  if (!tile.may_split()) return text("splits must be 1 for a tile that loads by elements, got ", plan.splits);
  if (problem.is_batch_invariant) return text("splits must be 1 for a batch-invariant call, got ", plan.splits);
  if (plan.splits > units_of(problem, tile)) return text("K is too short for ", plan.splits, " splits");
  if (bytes_of_sums(problem, plan) > kMostBytesOfSums) {
    return text("the sums of ", plan.splits, " splits take ", bytes_of_sums(problem, plan),
                " bytes of workspace; at most ", kMostBytesOfSums, " are allowed");
  }
  return std::string();
}

// Of fp32 there are fewer tiles, all by vectors, as are those of 16 bits with their numbers.
bool is_by_elements(const Plan& plan) { return kTiles[plan.tile].loads == Loads::Elements; }
static_assert(kTileCountTF32 <= kInvariantTileByElements && kTileCountSplit <= kInvariantTileByElements &&
              kTileCountScaled <= kInvariantTileByElements);

open::KernelName gemm_name(const Problem& problem, int tile) {
  constexpr open::KernelName kSplitNames[] = {"epigemm_open_sm80_mma_split_0", "epigemm_open_sm80_mma_split_1"};
  constexpr open::KernelName kScaledNames[] = {"epigemm_open_sm80_mma_scaled_0", "epigemm_open_sm80_mma_scaled_1",
                                               "epigemm_open_sm80_mma_scaled_2"};
  static_assert(std::size(kSplitNames) == kTileCountSplit && std::size(kScaledNames) == kTileCountScaled);
  static const sm90::TileNames others("sm80_mma", kTileCount);
  const Inputs inputs = inputs_of(problem);
  return inputs == Inputs::Split    ? kSplitNames[tile]
         : inputs == Inputs::Scaled ? kScaledNames[tile]
                                    : others.of(problem.x.element, tile);
}

class Mma final : public Family {
 public:
  bool computes(const Problem& problem) const override {
    return fp16_slices::computes(problem) || (!problem.is_pair && sm90::multiplies_as_stored(problem));
  }

  bool is_prelinked() const override { return false; }

  std::string why_not_on(const Device& device) const override {
    if (Sm80::is_of(device)) return std::string();
    return text("mma.sync kernels exist from compute capability 8.0 (Ampere) on; this device has ",
                device.capability / 10, ".", device.capability % 10);
  }

  std::string why_not(const Problem& problem) const override {
    std::string reason = why_not_on(problem.device);
    if (!reason.empty()) return reason;
    if (is_on_slices(problem.arithmetic)) {
      return problem.batch == 1 ? fp16_slices::why_not_sizes(problem) : sm90::kOneProduct;
    }
    // There are no tiles by elements in TF32, and none for batch-invariant calls: of many rows they take several times
    // as long as PyTorch's GEMM.
    const bool is_by_vectors_alone = is_tf32(problem) || (problem.is_batch_invariant && !problem.is_any_family_offered);
    return is_by_vectors_alone ? sm90::why_not_addressable(problem) : sm90::why_not_matrices(problem);
  }

  std::string why_not_planned(const Problem& problem, const Plan& plan) const override {
    const Tile& tile = tile_of(problem, plan.tile);
    if (tile.shared_bytes() > Sm80::shared_of_cta(problem.device)) {
      return text("the tile needs ", tile.shared_bytes(), " bytes of shared memory; this device has ",
                  Sm80::shared_of_cta(problem.device));
    }
    if (tiles_of(problem, tile) > kLargestExtent) return "there are too many tiles";
    if (std::string reason = why_not_split(problem, plan); !reason.empty()) return reason;
    const bool are_rows_read = is_by_elements(plan) || is_on_slices(problem.arithmetic);
    return are_rows_read ? std::string() : sm90::why_not_whole_vectors(problem);
  }

  bool reads_any_rows(const Plan& plan) const override { return is_by_elements(plan); }

  std::string why_not_accurate(const Problem& problem, const Plan& plan) const override {
    if (is_on_slices(problem.arithmetic)) return fp16_slices::why_not_accurate(problem);
    return sm90::why_sums_are_too_long(problem, plan.splits);
  }

  void for_each_candidate(const Problem& problem, const Visit& visit) const override {
    const bool are_vectors_whole = has_whole_vectors(problem);
    if (are_vectors_whole && is_left_to_tma(problem)) return;
    for (int index = 0; index < tile_count(problem); ++index) {
      if (is_by_elements(plan_of(index)) == are_vectors_whole) continue;
      for (int splits = 1; splits <= kMostSplits; splits *= 2) {
        const Plan plan = plan_of(index, splits);
        if (splits > 1 && !is_split_needed(problem, plan)) break;
        if (!why_not_planned(problem, plan).empty()) break;
        visit({plan, sm80_mma::microseconds(problem, plan)});
      }
    }
  }

  double microseconds(const Problem& problem, const Plan& plan) const override {
    return sm80_mma::microseconds(problem, plan);
  }

  Plan invariant_plan(const Problem& problem) const override {
    if (is_left_to_tma(problem)) return {};
    const bool are_vectors_whole = has_whole_vectors(problem);
    switch (inputs_of(problem)) {
      case Inputs::Split:
        return plan_of(kInvariantTileSplit);
      case Inputs::Scaled:
        return plan_of(kInvariantTileScaled);
      case Inputs::TF32:
        return are_vectors_whole ? plan_of(kInvariantTileTF32) : Plan{};
      case Inputs::Bits16:
        break;
    }
    return plan_of(are_vectors_whole ? kInvariantTile : kInvariantTileByElements);
  }

  int64_t workspace_bytes(const Problem& problem, const Plan& plan) const override {
    return fp16_slices::workspace_bytes(problem) + split_workspace_bytes(problem, plan);
  }

  open::KernelNames kernels(const Problem& problem, const Plan& plan) const override {
    open::KernelNames names;
    names.add(gemm_name(problem, plan.tile));
    if (is_on_slices(problem.arithmetic)) names.add("epigemm_open_sm80_fixup");
    return names;
  }

  int tile_count(const Problem& problem) const override { return sm80_mma::tile_count(inputs_of(problem)); }

  TileText describe(const Problem& problem, int index) const override {
    const Tile& tile = tile_of(problem, index);
    return {tile.m,
            tile.n,
            tile.columns(),
            1,
            1,
            tile.loads == Loads::Vectors ? "multistage" : "by elements",
            tile.shared_bytes()};
  }

  std::string fingerprint() const override {
    std::string text;
    const auto add = [&](const Tile& tile) {
      for (const int number : {tile.m, tile.n, tile.k, tile.stages, tile.warps_m, tile.warps_n,
                               static_cast<int>(tile.loads), tile.slices}) {
        text += std::to_string(number) + ",";
      }
    };
    for (const Tile& tile : kTiles) add(tile);
    for (const Tile& tile : kTilesTF32) add(tile);
    for (const Tile& tile : kTilesSplit) add(tile);
    for (const Tile& tile : kTilesScaled) add(tile);
    return text;
  }
};

}  // namespace

const Family& family() {
  static const Mma family;
  return family;
}

}  // namespace epigemm::sm80_mma
