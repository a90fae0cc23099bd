// fp32 products on fp16 slices: three products of two slices each (fp16x3), or one (fp16x1), with slices of the weight
// or with the weight as it lies, which the plan's tile tells; rows in groups with their weights as they lie. And in
// fp32 multiply-adds, by the fixup kernel, which recomputes what slices cannot represent: for batch-invariant calls
// alone, which PyTorch's GEMM cannot answer.
#include <iterator>

#include "gemm/fp16_slices/coverage.h"
#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90_fp16x3/costs.h"
#include "gemm/text.h"

namespace epigemm::sm90_fp16x3 {
namespace {

// The tile of the kernel in multiply-adds (fp32_tile.cuh).
constexpr int kMultiplyAddTileM = 128, kMultiplyAddTileN = 64;

constexpr int kResultBytes = 4;

// The fixup reduces a tile's blocks again (fixup_moments.cuh).
constexpr bool divides_fixup_tile(Tile const& tile) { return kMultiplyAddTileM % tile.moment_rows(kResultBytes) == 0; }

constexpr bool all_divide_fixup_tile() {
  for (const Arithmetic arithmetic : {Arithmetic::Split, Arithmetic::Scaled}) {
    for (int index = 0; index < tile_count(arithmetic); ++index) {
      if (!divides_fixup_tile(tile_of(arithmetic, index))) return false;
    }
  }
  return true;
}

static_assert(all_divide_fixup_tile(), "a block of statistics crosses tiles of the fixup");

// The least time: one multiply-add a lane and cycle. It is not compared with anything.
double multiply_add_microseconds(const Problem& p) {
  constexpr double kLanes = 128;
  using cost::as_double;
  return as_double(p.m) * as_double(p.n) * as_double(p.k) / (kLanes * p.device.multiprocessors * p.device.clock_mhz);
}

// The grid is not padded.
Plan plan_of(int index, Raster raster, int splits = 1) {
  return {FamilyId::sm90_fp16x3, index, raster, /*swizzle=*/8, splits};
}

// Of each of the CTAs that share the K of a tile: a block of sums (as_it_lies_mainloop.h). With fewer the bound of a
// result's error would be larger than without the division (docs/numerics.md).
constexpr int64_t kLeastSharedK = 512;

// CTAs share K where tiles are fewer than multiprocessors: a cluster has a single tile.
bool may_share(const Problem& p, int index, int splits) {
  if (p.groups) return false;
  const Tile& tile = tile_of(p.arithmetic, index);
  const Grid grid = grid_of(p, tile);
  return is_as_it_lies(p.arithmetic, index) && may_share_k(tile) && p.k >= kLeastSharedK * splits &&
         sm90::run_at_once(grid.clusters(), splits, p.device.multiprocessors);
}

bool has_groups(Arithmetic arithmetic, int index) {
  return index_in_groups(arithmetic, index - sliced_tile_count(arithmetic)) >= 0;
}

std::string why_not_groups(const Problem& p) {
  if (p.groups.count * p.n > kLargestExtent) {
    return text("all groups' weights together must have at most ", kLargestExtent, " rows");
  }
  if (p.m > sm90::kGroupedRows) return text("rows in groups must be at most ", sm90::kGroupedRows);
  return fp16_slices::why_not_as_it_lies(p);
}

// The weight as it lies, where it has no pack, which is read faster. A tile of few rows is not walked many times: 16
// rows not even twice, where there is a tile of 32. Below kShortK no tile is walked twice: two such calls took 9 and
// 16% more time than with slices. Those of a transposed weight take longer, so it is excepted. Below kLeastK nothing
// was measured.
bool is_as_it_lies_candidate(const Problem& p, const Tile& tile) {
  constexpr int64_t kLeastK = 512, kShortK = 1024, kFewRows = 64;
  if (p.is_packed || !fp16_slices::why_not_as_it_lies(p).empty()) return false;
  if (p.is_any_family_offered) return true;
  if (p.k < kLeastK || (p.k < kShortK && p.m > tile.m && !p.is_weight_transposed)) return false;
  const int times = p.arithmetic == Arithmetic::Split && tile.m == 16 ? 1 : 2;
  return tile.m >= kFewRows || p.m <= times * tile.m;
}

// With more rows than a transposed tile has, the weight is read more than once, which is acceptable for a small one. At
// a short K these tiles were measured 8 to 30 us slower than their model predicts.
bool is_candidate(const Problem& p, int index) {
  constexpr int64_t kLeastK = 512, kLeastKOfTwo = 2048, kMostColumnsOfTwo = 4096;
  const Tile& tile = tile_of(p.arithmetic, index);
  if (p.groups) return has_groups(p.arithmetic, index);
  if (is_as_it_lies(p.arithmetic, index)) return is_as_it_lies_candidate(p, tile);
  if (!tile.transposed) return true;
  if (p.m <= tile.m) return p.k >= kLeastK;
  return tile.m == 16 && p.m <= 2 * tile.m && p.k >= kLeastKOfTwo && p.n < kMostColumnsOfTwo;
}

open::KernelName grouped_name(Arithmetic arithmetic, int tile, bool is_weight_transposed) {
  constexpr open::KernelName kNames[2][2][kGroupedTileCount] = {
      {{"epigemm_open_as_it_lies_grouped_split_0", "epigemm_open_as_it_lies_grouped_split_1",
        "epigemm_open_as_it_lies_grouped_split_2"},
       {"epigemm_open_as_it_lies_grouped_transposed_split_0", "epigemm_open_as_it_lies_grouped_transposed_split_1",
        "epigemm_open_as_it_lies_grouped_transposed_split_2"}},
      {{"epigemm_open_as_it_lies_grouped_scaled_0", "epigemm_open_as_it_lies_grouped_scaled_1",
        "epigemm_open_as_it_lies_grouped_scaled_2"},
       {"epigemm_open_as_it_lies_grouped_transposed_scaled_0", "epigemm_open_as_it_lies_grouped_transposed_scaled_1",
        "epigemm_open_as_it_lies_grouped_transposed_scaled_2"}}};
  const int index = index_in_groups(arithmetic, tile - sliced_tile_count(arithmetic));
  return kNames[arithmetic == Arithmetic::Scaled][is_weight_transposed][index];
}

open::KernelName gemm_name(Arithmetic arithmetic, int tile, bool is_weight_transposed) {
  constexpr open::KernelName kSplitNames[] = {"epigemm_open_sm90_fp16x3_split_0", "epigemm_open_sm90_fp16x3_split_1",
                                              "epigemm_open_sm90_fp16x3_split_2", "epigemm_open_sm90_fp16x3_split_3",
                                              "epigemm_open_as_it_lies_split_0",  "epigemm_open_as_it_lies_split_1",
                                              "epigemm_open_as_it_lies_split_2",  "epigemm_open_as_it_lies_split_3"};
  constexpr open::KernelName kScaledNames[] = {"epigemm_open_sm90_fp16x3_scaled_0", "epigemm_open_sm90_fp16x3_scaled_1",
                                               "epigemm_open_sm90_fp16x3_scaled_2", "epigemm_open_as_it_lies_scaled_0",
                                               "epigemm_open_as_it_lies_scaled_1",  "epigemm_open_as_it_lies_scaled_2",
                                               "epigemm_open_as_it_lies_scaled_3"};
  static_assert(std::size(kSplitNames) == tile_count(Arithmetic::Split) &&
                std::size(kScaledNames) == tile_count(Arithmetic::Scaled));
  constexpr open::KernelName kTransposedSplitNames[] = {
      "epigemm_open_as_it_lies_transposed_split_0", "epigemm_open_as_it_lies_transposed_split_1",
      "epigemm_open_as_it_lies_transposed_split_2", "epigemm_open_as_it_lies_transposed_split_3"};
  constexpr open::KernelName kTransposedScaledNames[] = {
      "epigemm_open_as_it_lies_transposed_scaled_0", "epigemm_open_as_it_lies_transposed_scaled_1",
      "epigemm_open_as_it_lies_transposed_scaled_2", "epigemm_open_as_it_lies_transposed_scaled_3"};
  static_assert(std::size(kTransposedSplitNames) == kAsItLiesSplitTileCount &&
                std::size(kTransposedScaledNames) == kAsItLiesScaledTileCount);
  if (is_weight_transposed && is_as_it_lies(arithmetic, tile)) {
    const int behind = tile - sliced_tile_count(arithmetic);
    return arithmetic == Arithmetic::Split ? kTransposedSplitNames[behind] : kTransposedScaledNames[behind];
  }
  return arithmetic == Arithmetic::Split ? kSplitNames[tile] : kScaledNames[tile];
}

class FP16x3 final : public Family {
 public:
  bool computes(const Problem& p) const override {
    if (p.groups && (epilogue_info(p.epilogue).has_store || !is_on_slices(p.arithmetic))) return false;
    if (is_on_slices(p.arithmetic)) return fp16_slices::computes(p);
    return !p.is_pair && p.arithmetic == Arithmetic::IEEE && p.is_batch_invariant &&
           p.x.element == ElementType::Float32 && p.weight.element == ElementType::Float32 &&
           p.out.element == ElementType::Float32;
  }

  std::string why_not_on(const Device& device) const override { return sm90::why_not_on(device); }

  std::string why_not(const Problem& p) const override {
    std::string reason = sm90::why_not_on(p.device);
    if (!reason.empty()) return reason;
    if (p.batch != 1) return sm90::kOneProduct;
    reason = fp16_slices::why_not_sizes(p);
    return reason.empty() && p.groups ? why_not_groups(p) : reason;
  }

  std::string why_not_planned(const Problem& p, const Plan& plan) const override {
    if (p.groups && !has_groups(p.arithmetic, plan.tile)) {
      return text("tile ", plan.tile, " has no kernel of rows in groups");
    }
    if (p.groups && plan.splits > 1) return text("splits must be 1 with rows in groups, got ", plan.splits);
    const bool reads = reads_weight(p.arithmetic, plan);
    if (plan.splits > 1 && !(reads && may_share_k(tile_of(p.arithmetic, plan.tile)))) {
      return text("splits must be 1 ", reads ? "in this tile" : "on fp16 slices", ", got ", plan.splits);
    }
    if (!reads) return {};
    const std::string reason = sm90::why_not_shared(p.k, kTileK, plan.splits);
    return reason.empty() ? fp16_slices::why_not_as_it_lies(p) : reason;
  }

  bool reads_weight(Arithmetic arithmetic, const Plan& plan) const override {
    return is_on_slices(arithmetic) && is_as_it_lies(arithmetic, plan.tile);
  }

  std::string why_not_accurate(const Problem& p, const Plan& plan) const override {
    if (plan.splits > 1 && p.k < kLeastSharedK * plan.splits) {
      return text("K = ", p.k, " is below ", kLeastSharedK, " for each of the ", plan.splits, " CTAs that share it");
    }
    return fp16_slices::why_not_accurate(p);
  }

  void for_each_candidate(const Problem& problem, const Visit& visit) const override {
    for (int index = 0; index < sm90_fp16x3::tile_count(problem.arithmetic); ++index) {
      if (!is_candidate(problem, index)) continue;
      for (const Raster raster : {Raster::AlongM, Raster::AlongN}) {
        for (const int splits : sm90::kSplits) {
          if (splits > 1 && !may_share(problem, index, splits)) break;
          const Plan plan = plan_of(index, raster, splits);
          visit({plan, sm90_fp16x3::microseconds(problem, plan)});
        }
      }
    }
  }

  double microseconds(const Problem& problem, const Plan& plan) const override {
    if (problem.arithmetic == Arithmetic::IEEE) return multiply_add_microseconds(problem);
    return sm90_fp16x3::microseconds(problem, plan);
  }

  // Along M: the CTAs that run at once then share their part of the weight, the larger operand, through L2.
  Plan invariant_plan(const Problem& problem) const override {
    if (problem.groups) return {};
    if (problem.arithmetic == Arithmetic::IEEE) return {FamilyId::sm90_fp16x3};
    return plan_of(invariant_tile(problem.arithmetic), Raster::AlongM);
  }

  int64_t workspace_bytes(const Problem& p, const Plan& plan) const override {
    return reads_weight(p.arithmetic, plan) ? fp16_slices::workspace_bytes_as_it_lies(p)
                                            : fp16_slices::workspace_bytes(p);
  }

  // The product in multiply-adds reduces nothing.
  int moment_rows(const Problem& problem, const Plan& plan) const override {
    const bool has_none = problem.arithmetic == Arithmetic::IEEE || problem.groups;
    return has_none ? 0 : tile_of(problem.arithmetic, plan.tile).moment_rows(kResultBytes);
  }

  bool stores() const override { return true; }
  bool takes_groups() const override { return true; }

  open::KernelNames kernels(const Problem& problem, const Plan& plan) const override {
    open::KernelNames names;
    if (problem.arithmetic == Arithmetic::IEEE) {
      names.add("epigemm_open_fp32");
    } else if (problem.groups) {
      names.add(grouped_name(problem.arithmetic, plan.tile, problem.is_weight_transposed));
      names.add("epigemm_open_fixup_grouped");
    } else {
      names.add(gemm_name(problem.arithmetic, plan.tile, problem.is_weight_transposed));
      names.add("epigemm_open_fixup");
    }
    return names;
  }

  int tile_count(const Problem& p) const override {
    if (p.arithmetic == Arithmetic::IEEE) return 1;
    return p.is_weight_readable ? sm90_fp16x3::tile_count(p.arithmetic) : sliced_tile_count(p.arithmetic);
  }

  TileText describe(const Problem& problem, int index) const override {
    if (problem.arithmetic == Arithmetic::IEEE) {
      return {kMultiplyAddTileM, kMultiplyAddTileN, 1, 1, 1, "fp32 multiply-adds"};
    }
    const Tile& tile = tile_of(problem.arithmetic, index);
    const char* schedule = is_as_it_lies(problem.arithmetic, index) ? "cooperative transposed, fp32 weight"
                           : tile.transposed                        ? "cooperative transposed"
                                                                    : schedule_name(tile.schedule);
    return {tile.m, tile.n, kTileK, tile.cluster_m, tile.cluster_n, schedule};
  }

  std::string fingerprint() const override {
    std::string text;
    for (const Arithmetic arithmetic : {Arithmetic::Split, Arithmetic::Scaled}) {
      for (int index = 0; index < sm90_fp16x3::tile_count(arithmetic); ++index) {
        const Tile& tile = tile_of(arithmetic, index);
        for (const int number : {tile.m, tile.n, tile.cluster_m, tile.cluster_n, static_cast<int>(tile.schedule),
                                 static_cast<int>(tile.transposed), tile.stages, tile.slots, tile.slot_bytes}) {
          text += std::to_string(number) + ",";
        }
      }
    }
    return text;
  }
};

}  // namespace

const Family& family() {
  static const FP16x3 family;
  return family;
}

}  // namespace epigemm::sm90_fp16x3
