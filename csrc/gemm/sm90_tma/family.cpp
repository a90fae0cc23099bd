// The large tiles, which multiply the tensors themselves.
#include <algorithm>
#include <string>
#include <vector>

#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90/kernel_names.h"
#include "gemm/sm90_tma/costs.h"
#include "gemm/text.h"

namespace epigemm::sm90_tma {
namespace {

// One order for all tiles: within 3% of the best of three for shapes of every kind (H100). The grid is not padded.
Plan plan_of(int index, int splits = 1) { return {FamilyId::sm90_tma, index, Raster::AlongM, /*swizzle=*/8, splits}; }

bool is_e5m2_beside(const Problem& p) {
  return p.x.element == ElementType::Float8E5M2 || p.weight.element == ElementType::Float8E5M2;
}

int count_of_8_bits(const Problem& p) {
  const int count = tiles_of_8_bits(p).count;
  if (is_e5m2_beside(p)) return kE5M2TileCount;
  const bool is_other = !is_8_bits(p.out.element) && p.out.element != ElementType::BFloat16;
  return is_other ? std::min(count, p.is_pair ? kOtherResultPairCount : kOtherResultTileCount) : count;
}

// Products of 8 bits: e4m3 by e4m3; or, to bf16 and no pairs, e5m2 by e4m3, or the other way round.
bool multiplies_8_bits(const Problem& p) {
  const bool are_8_bits = is_8_bits(p.x.element) && is_8_bits(p.weight.element);
  const bool are_both_e5m2 = p.x.element == p.weight.element && p.x.element == ElementType::Float8E5M2;
  const bool is_result = p.out.element != ElementType::Float64 && p.out.element != ElementType::Float8E5M2;
  const bool is_arithmetic =
      (p.arithmetic == Arithmetic::Fast && !p.x_scale.is_of_blocks) || p.arithmetic == Arithmetic::Promoted;
  const bool is_any_result =
      !is_e5m2_beside(p) || (p.out.element == ElementType::BFloat16 && !p.is_pair && !p.x_scale.is_of_blocks);
  const bool is_stored = !epilogue_info(p.epilogue).has_store || !is_8_bits(p.out.element);
  return are_8_bits && !are_both_e5m2 && is_result && is_any_result && is_stored && is_arithmetic &&
         count_of_8_bits(p) > 0;
}

// epigemm_open_sm90_tma_{e4m3,e5m2}_{e4m3,e5m2}_RESULT_{fast,promoted,blocks}_TILE and, for pairs, _pair, of which not
// all exist
open::KernelName name_of_8_bits(const Problem& p, int tile) {
  constexpr int kKinds = 2, kSums = 3, kResults = 5, kWide = 3, kMostTiles = kFastTileCount;
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    for (const char* const x : {"e4m3", "e5m2"}) {
      for (const char* const weight : {"e4m3", "e5m2"}) {
        for (const char* const result : {"float16", "bfloat16", "float32", "bfloat16_to_e4m3", "bfloat16_to_blocks"}) {
          for (const char* const sums : {"fast", "promoted", "blocks"}) {
            for (const char* const pair : {"", "_pair"}) {
              for (int i = 0; i < kMostTiles; ++i) {
                made.push_back(text("epigemm_open_sm90_tma_", x, "_", weight, "_", result, "_", sums, "_", i, pair));
              }
            }
          }
        }
      }
    }
    return made;
  }();
  std::size_t place = p.x.element == ElementType::Float8E5M2;
  place = place * kKinds + (p.weight.element == ElementType::Float8E5M2);
  const std::size_t result =
      is_8_bits(p.out.element) ? kWide + p.out_scale.is_of_blocks : static_cast<std::size_t>(p.out.element);
  place = place * kResults + result;
  place = place * kSums + static_cast<std::size_t>(sums_of_8_bits(p));
  place = place * kKinds + p.is_pair;
  return names[place * kMostTiles + tile];
}

int count_of(const Problem& problem) {
  if (problem.groups) return problem.is_pair ? kGroupedPairTileCount : kGroupedTileCount;
  if (is_8_bits(problem.x.element)) return count_of_8_bits(problem);
  return problem.is_pair ? kPairTileCount : problem.arithmetic == Arithmetic::TF32 ? kTF32TileCount : kTileCount;
}

// Whether there is a kernel whose CTAs share the K of a tile.
bool may_share(const Problem& p, int index) {
  return is_8_bits(p.x.element) && !p.groups && may_share_k(tile_of(p, index), p.is_pair);
}

// They do where tiles are fewer than multiprocessors: a cluster has a single tile.
bool is_candidate(const Problem& p, int index, int splits) {
  constexpr int64_t kLeastSharedK = 512;  // of each
  return splits == 1 || (may_share(p, index) && p.k >= kLeastSharedK * splits &&
                         sm90::run_at_once(grid_of(p, tile_of(p, index)).clusters(), splits, p.device.multiprocessors));
}

class Tma final : public Family {
 public:
  bool computes(const Problem& problem) const override {
    if (problem.groups && epilogue_info(problem.epilogue).has_store) return false;
    if (is_8_bits(problem.x.element)) return multiplies_8_bits(problem) && !problem.groups;
    const bool is_16_bits_alone = problem.is_pair || problem.groups;
    return sm90::multiplies_as_stored(problem) && (!is_16_bits_alone || element_bytes(problem.x.element) == 2);
  }

  std::string why_not_on(const Device& device) const override { return sm90::why_not_on(device); }

  std::string why_not(const Problem& problem) const override {
    std::string reason = sm90::why_not_on(problem.device);
    return reason.empty() ? sm90::why_not_addressable(problem) : reason;
  }

  std::string why_not_planned(const Problem& problem, const Plan& plan) const override {
    if (plan.tile >= count_of(problem)) {
      return text("tile must be below ", count_of(problem), " for these types of x, weight and result, got ",
                  plan.tile);
    }
    if (plan.splits == 1) return {};
    if (!may_share(problem, plan.tile)) return text("splits must be 1 in this tile, got ", plan.splits);
    return sm90::why_not_shared(problem.k, kTileKBytes, plan.splits);
  }

  // A batch-invariant call has no other plan. docs/numerics.md gives the error of its long TF32 sums.
  std::string why_not_accurate(const Problem& problem, const Plan&) const override {
    if (problem.is_batch_invariant) return std::string();
    return sm90::why_sums_are_too_long(problem, /*splits=*/1);
  }

  void for_each_candidate(const Problem& problem, const Visit& visit) const override {
    for (int index = 0; index < count_of(problem); ++index) {
      for (const int splits : sm90::kSplits) {
        if (!is_candidate(problem, index, splits)) break;
        const Plan plan = plan_of(index, splits);
        visit({plan, sm90_tma::microseconds(problem, plan)});
      }
    }
  }

  double microseconds(const Problem& problem, const Plan& plan) const override {
    return sm90_tma::microseconds(problem, plan);
  }

  Plan invariant_plan(const Problem& problem) const override {
    if (problem.is_pair || problem.groups) return {};
    return plan_of(is_8_bits(problem.x.element) ? kInvariantTileOf8Bits : kInvariantTile);
  }

  int moment_rows(const Problem& problem, const Plan& plan) const override {
    const bool has_none = problem.is_pair || problem.groups || is_8_bits(problem.out.element);
    return has_none ? 0 : tile_of(problem, plan.tile).moment_rows(element_bytes(problem.out.element));
  }

  bool stores() const override { return true; }
  bool takes_groups() const override { return true; }

  open::KernelNames kernels(const Problem& problem, const Plan& plan) const override {
    static const sm90::TileNames of_tiles("sm90_tma", kTileCount), of_pairs("sm90_tma", kPairTileCount, "_pair"),
        of_groups[] = {{"sm90_tma", kGroupedTileCount, "_grouped"},
                       {"sm90_tma", kGroupedTileCount, "_grouped_transposed"}},
        of_grouped_pairs[] = {{"sm90_tma", kGroupedPairTileCount, "_grouped_pair"},
                              {"sm90_tma", kGroupedPairTileCount, "_grouped_transposed_pair"}};
    open::KernelNames names;
    if (is_8_bits(problem.x.element)) {
      names.add(name_of_8_bits(problem, plan.tile));
      return names;
    }
    if (problem.groups) {
      const sm90::TileNames* const of_orders = problem.is_pair ? of_grouped_pairs : of_groups;
      names.add(of_orders[problem.is_weight_transposed].of(problem.x.element, plan.tile));
    } else {
      names.add((problem.is_pair ? of_pairs : of_tiles).of(problem.x.element, plan.tile));
    }
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
