#include "gemm/split/dispatch.h"

#include <algorithm>
#include <limits>

#include "gemm/grid.h"
#include "gemm/split/layout.h"
#include "gemm/split/tile_costs.h"
#include "gemm/text.h"

namespace epigemm::split {
namespace {

// Below, three products of 22 bits are no better than one of 24: rounding the operands, which SGEMM does not do, is
// most of the error. From a recorded sweep (docs/numerics.md): from here on both the largest and the rms error are
// below SGEMM's for every class of dense data.
constexpr int64_t kLeastK = 128;
// The single product is summed on the tensor cores alone, which truncate: from 16384 on the error on all-positive data
// would exceed that of cuBLAS's TF32, which splits such long sums.
constexpr int64_t kLeastScaledK = 16, kMostScaledK = 8192;

}  // namespace

std::string why_not_possible(const SplitTraits& t) {
  if (!epilogue_info(t.epilogue).linear) {
    return text("epilogue '", epilogue_info(t.epilogue).name, "' has no GEMM kernels");
  }
  if (t.capability == 0) return "the tensors are not on a CUDA device";
  if (t.capability / 10 != 9) {
    return text("fused kernels exist for compute capability 9.0 (Hopper); this device has ", t.capability / 10, ".",
                t.capability % 10);
  }
  if (t.m == 0 || t.n == 0 || t.k == 0) {
    return text("the product is empty (M = ", t.m, ", N = ", t.n, ", K = ", t.k, ")");
  }
  if (t.m > kLargestExtent || t.n > kLargestExtent || t.k > kMostColumns) {
    return text("M and N must be at most ", kLargestExtent, " and K at most ", kMostColumns);
  }
  return std::string();
}

std::string why_not_accurate(const SplitTraits& t) {
  if (t.arithmetic == Arithmetic::Split && t.k < kLeastK) {
    return text("K = ", t.k, " is below ", kLeastK,
                ", from where on the split's error is below that of an IEEE fp32 product");
  }
  if (t.arithmetic == Arithmetic::Scaled && (t.k < kLeastScaledK || t.k > kMostScaledK)) {
    return text("K = ", t.k, " is outside ", kLeastScaledK, "..", kMostScaledK,
                ", where one scaled fp16 product is as accurate as TF32");
  }
  return std::string();
}

namespace {

// --- Cost model -----------------------------------------------------------------------------------------------------

constexpr double kBytesPerMicrosecond = 4.3e6;  // device memory of an H200, all multiprocessors together

double as_double(int64_t x) { return static_cast<double>(x); }

int piece_bytes(const SplitTraits& t) { return t.arithmetic == Arithmetic::Split ? 4 : 2; }

// A row is read once as fp32 and written once as pieces.
double split_microseconds(const SplitTraits& t, int64_t rows) {
  constexpr double kLaunch = 5, kTrafficFactor = 1.15;
  return kLaunch + kTrafficFactor * as_double(rows) * as_double(t.k) * (4 + piece_bytes(t)) / kBytesPerMicrosecond;
}

Grid grid_of(const SplitTraits& t, const Tile& tile) {
  return {ceil_div(ceil_div(t.m, tile.m), tile.cluster_m), ceil_div(ceil_div(t.n, tile.n), tile.cluster_n)};
}

int ctas_per_cluster(const Tile& tile) { return tile.cluster_m * tile.cluster_n; }

// What the CTAs load between them; those of a cluster share by multicast.
double loaded_bytes(const SplitTraits& t, const Tile& tile) {
  const double rows = as_double(tile.m) / tile.cluster_n + as_double(tile.n) / tile.cluster_m;
  return as_double(grid_of(t, tile).clusters() * ctas_per_cluster(tile)) * rows * as_double(t.k) * piece_bytes(t);
}

// Whole waves of tiles, each as long as its mainloop and what shows of its epilogue; or memory, or L2, where that is
// longer.
double gemm_microseconds(const SplitTraits& t, int index) {
  constexpr double kLaunch = 3, kL2BytesPerMicrosecond = 6.2e6;
  const Tile& tile = tile_of(t.arithmetic, index);
  const TileCost& cost = cost_of(t.arithmetic, index);
  const double per_tile = as_double(ceil_div(t.k, kTileK)) * cost.step_microseconds + cost.epilogue_microseconds;
  const int64_t rounds = waves(grid_of(t, tile).clusters(), ctas_per_cluster(tile), t.multiprocessors);
  const double bytes = piece_bytes(t) * as_double(t.k) * as_double(t.m + t.n) + 4 * as_double(t.m) * as_double(t.n);
  return kLaunch + std::max({as_double(rounds) * per_tile, cost.traffic_factor * bytes / kBytesPerMicrosecond,
                             loaded_bytes(t, tile) / kL2BytesPerMicrosecond});
}

double call_microseconds(const SplitTraits& t, int index) {
  constexpr double kGuard = 2;
  return split_microseconds(t, t.m) + (t.packed ? 0 : split_microseconds(t, t.n)) + gemm_microseconds(t, index) +
         kGuard;
}

// Along M: the CTAs at work then share their part of the weight, the larger operand, through L2.
Plan plan_for(const SplitTraits& t, int index) {
  const Tile& tile = tile_of(t.arithmetic, index);
  return {index, Raster::AlongM, choose_swizzle(grid_of(t, tile), ctas_per_cluster(tile), t.multiprocessors)};
}

// The rows of a transposed tile: with more, the weight would stream by more than once.
bool is_candidate(const SplitTraits& t, int index) {
  const Tile& tile = tile_of(t.arithmetic, index);
  return !tile.transposed || t.m <= tile.m;
}

std::string not_fastest(const SplitTraits& t) {
  const double fused = best_candidate(t).microseconds, second = second_path_microseconds(t);
  if (fused <= second) return std::string();
  return text("PyTorch's GEMM and one elementwise kernel are expected to be faster (", second, " us against ", fused,
              " us on fp16 pieces", t.packed ? ")" : ", of which the weight takes its share at every call: see pack)");
}

// Rows that cuBLAS's SGEMM works on for M, in the shapes measured (M = 16 to 128).
int64_t sgemm_rows(int64_t m) { return m > 32 && m <= 64 ? 64 : round_up(m, 32); }

// cuBLAS at its measured rate, rather too fast than too slow. A short grid of SGEMM takes as long as one of its CTAs
// needs to walk along K; one row is a product of its own, bound by memory. The TF32 GEMM is bound by the one or by the
// other.
double gemm_second_path_microseconds(const SplitTraits& t) {
  constexpr double kSgemmProducts = 0.194, kTF32Products = 1.43;  // millions a microsecond and multiprocessor
  constexpr double kLaunch = 5, kSgemmStep = 0.0025, kBoundTrafficFactor = 1.35, kVisibleTraffic = 0.15;
  const double m = as_double(t.m), n = as_double(t.n), k = as_double(t.k);
  const double traffic = 4 * (m * k + n * k + m * n) / kBytesPerMicrosecond;
  const double columns = 1e-6 * n * k / std::max(1, t.multiprocessors);
  if (t.tf32_allowed) {
    return kLaunch + std::max(as_double(round_up(t.m, 32)) * columns / kTF32Products, kBoundTrafficFactor * traffic);
  }
  if (t.m == 1) return kLaunch + kBoundTrafficFactor * traffic;
  return kLaunch + kSgemmStep * k + as_double(sgemm_rows(t.m)) * columns / kSgemmProducts + kVisibleTraffic * traffic;
}

// The measured plan was the best at the edge of M's bucket, and its swizzle fitted the grid there.
Plan fitted(const SplitTraits& t, Plan plan) {
  if (t.m != tuned::bucket_edge(t.m)) {
    const Tile& tile = tile_of(t.arithmetic, plan.tile);
    plan.swizzle = fitting_swizzle(plan.swizzle, grid_of(t, tile), ctas_per_cluster(tile), t.multiprocessors);
  }
  return plan;
}

std::optional<tuned::Choice> find_measured(const SplitTraits& t) {
  tuned::Key key;
  key.epilogue = t.epilogue;
  key.element = ElementType::Float32;
  key.arithmetic = t.arithmetic;
  key.packed = t.packed;
  key.one_kernel = second_path_is_one_kernel(t.epilogue, t.has_bias);
  key.tf32_allowed = t.tf32_allowed;
  key.n = t.n;
  key.k = t.k;
  key.m = tuned::bucket_edge(t.m);
  return t.device < 0 ? std::nullopt : tuned::find(t.device, key);
}

}  // namespace

double second_path_microseconds(const SplitTraits& t) {
  constexpr double kElementwiseLaunch = 3;
  const double gemm = gemm_second_path_microseconds(t);
  if (second_path_is_one_kernel(t.epilogue, t.has_bias)) return gemm;
  return gemm + kElementwiseLaunch + 2 * 4 * as_double(t.m) * as_double(t.n) / kBytesPerMicrosecond;
}

std::string why_not_fused(const SplitTraits& traits) {
  std::string reason = why_not_possible(traits);
  if (reason.empty()) reason = why_not_accurate(traits);
  if (!reason.empty()) return reason;
  if (const std::optional<tuned::Choice> measured = find_measured(traits)) {
    return measured->fused() ? std::string() : slower_as_measured(*measured);
  }
  return not_fastest(traits);
}

std::optional<tuned::Choice> measured_choice(const SplitTraits& traits) {
  std::optional<tuned::Choice> choice = find_measured(traits);
  if (choice && !why_not_possible(traits).empty()) return std::nullopt;
  if (choice) choice->plan = fitted(traits, choice->plan);
  return choice;
}

Plan chosen_plan(const SplitTraits& traits) {
  const std::optional<tuned::Choice> measured = find_measured(traits);
  return measured ? fitted(traits, measured->plan) : best_candidate(traits).plan;
}

std::vector<Candidate> rank_candidates(const SplitTraits& traits) {
  std::vector<Candidate> candidates;
  for (int index = 0; index < tile_count(traits.arithmetic); ++index) {
    if (!is_candidate(traits, index)) continue;
    candidates.push_back({plan_for(traits, index), call_microseconds(traits, index)});
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.microseconds < b.microseconds; });
  return candidates;
}

Candidate best_candidate(const SplitTraits& traits) {
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int index = 0; index < tile_count(traits.arithmetic); ++index) {
    if (!is_candidate(traits, index)) continue;
    const double microseconds = call_microseconds(traits, index);
    if (microseconds < least) {
      least = microseconds;
      best = index;
    }
  }
  return {plan_for(traits, best), least};
}

Candidate invariant_candidate(const SplitTraits& traits) {
  const int tile = invariant_tile(traits.arithmetic);
  return {plan_for(traits, tile), call_microseconds(traits, tile)};
}

}  // namespace epigemm::split
