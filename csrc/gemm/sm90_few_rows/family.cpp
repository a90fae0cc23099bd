// fp32 in multiply-adds, where x or the weight has few rows: the other matrix is read once, which takes all the time.
#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "gemm/sm90/coverage.h"
#include "gemm/sm90_few_rows/costs.h"
#include "gemm/text.h"

namespace epigemm::sm90_few_rows {
namespace {

constexpr open::KernelName kNames[] = {"epigemm_open_sm90_few_rows_0", "epigemm_open_sm90_few_rows_1",
                                       "epigemm_open_sm90_few_rows_2", "epigemm_open_sm90_few_rows_3"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == kTileCount, "a kernel a tile");

class FewRows final : public Family {
 public:
  // Where TF32 is allowed, fp32 is, too; with more rows TF32 has other kernels.
  bool computes(const Problem& p) const override {
    constexpr ElementType kElement = ElementType::Float32;
    const bool is_asked_for =
        p.arithmetic == Arithmetic::IEEE || (p.arithmetic == Arithmetic::TF32 && std::min(p.m, p.n) <= kMostFew);
    return is_asked_for && !p.is_pair && !p.is_batch_invariant && p.x.element == kElement &&
           p.weight.element == kElement && p.out.element == kElement;
  }

  std::string why_not_on(const Device& device) const override {
    return sm90::why_not_on(device).empty() ? std::string() : "fp32 multiply-adds are fused on Hopper alone";
  }

  std::string why_not(const Problem& p) const override {
    if (std::string reason = why_not_on(p.device); !reason.empty()) return reason;
    if (std::min(p.m, p.n) > kMostFew) {
      return text("fp32 multiply-adds are fused for at most ", kMostFew, " rows of x or of the weight (M = ", p.m,
                  ", N = ", p.n, ")");
    }
    return sm90::why_not_matrices(p);
  }

  std::string why_not_planned(const Problem& p, const Plan& plan) const override {
    const int few = kTiles[plan.tile].few;
    if (std::min(p.m, p.n) > few) return text("the tile has ", few, " rows; M = ", p.m, ", N = ", p.n);
    if (ceil_div(p.k, kStageK) < plan.splits) return text("K is too short for ", plan.splits, " splits");
    return std::string();
  }

  bool reads_any_rows(const Plan&) const override { return true; }

  std::string why_not_accurate(const Problem&, const Plan&) const override { return std::string(); }

  void for_each_candidate(const Problem& p, const Visit& visit) const override {
    int index = 0;
    while (std::min(p.m, p.n) > kTiles[index].few) ++index;
    for (int splits = 1; splits <= kMostSplits; splits *= 2) {
      const Plan plan{FamilyId::sm90_few_rows, index, Raster::AlongM, /*swizzle=*/1, splits};
      if (why_not_planned(p, plan).empty()) visit({plan, sm90_few_rows::microseconds(p, plan)});
    }
  }

  double microseconds(const Problem& p, const Plan& plan) const override {
    return sm90_few_rows::microseconds(p, plan);
  }

  bool stores() const override { return true; }

  open::KernelNames kernels(const Problem&, const Plan& plan) const override {
    open::KernelNames names;
    names.add(kNames[plan.tile]);
    return names;
  }

  int tile_count(const Problem&) const override { return kTileCount; }

  TileText describe(const Problem& p, int index) const override {
    const Tile& tile = kTiles[index];
    const bool is_x = are_few_of_x(p);
    return {is_x ? tile.few : tile.many, is_x ? tile.many : tile.few, kStageK, 1, 1, "fp32 multiply-adds"};
  }

  std::string fingerprint() const override {
    std::string text;
    for (const Tile& tile : kTiles) {
      for (const int number : {tile.few, tile.many, tile.threads, tile.ctas_per_multiprocessor}) {
        text += std::to_string(number) + ",";
      }
    }
    return text;
  }
};

}  // namespace

const Family& family() {
  static const FewRows family;
  return family;
}

}  // namespace epigemm::sm90_few_rows
