#include "gemm/dispatch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "gemm/grid.h"
#include "gemm/narrow/cost.h"
#include "gemm/sm90/tile_costs.h"
#include "gemm/text.h"

namespace epigemm {
namespace {

constexpr int64_t kMostGridRows = 65535;  // tiles along either axis of a narrow kernel
constexpr int kTmaAlignment = 16;         // bytes: what the tensor memory accelerator asks of pointers and row strides

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(address == 0 ? 256 : std::min<uintptr_t>(address & (~address + 1), 256));
}

std::string misaligned_row(const char* argument, int64_t row_stride, int bytes) {
  return text(argument, " has a row stride of ", row_stride, " elements (", row_stride * bytes,
              " bytes); fused kernels need a multiple of ", kTmaAlignment, " bytes");
}

std::string misaligned_length(const char* extent, int64_t length, int bytes) {
  return text(extent, " = ", length, " elements are ", length * bytes,
              " bytes; fused kernels need rows of a multiple of ", kTmaAlignment, " bytes");
}

// What the kernels do not compute, wherever the operands lie.
std::string not_computed(const ProblemTraits& t) {
  if (!epilogue_info(t.epilogue).linear) {
    return text("epilogue '", epilogue_info(t.epilogue).name, "' has no GEMM kernels");
  }
  if (t.capability == 0) return "the tensors are not on a CUDA device";
  if (t.capability / 10 != 9) {
    return text("fused kernels exist for compute capability 9.0 (Hopper); this device has ", t.capability / 10, ".",
                t.capability % 10);
  }
  if (t.element == ElementType::Float64) {
    return "fused kernels exist for float16, bfloat16 and float32 (as TF32), not for float64";
  }
  if (t.element == ElementType::Float32 && t.arithmetic != Arithmetic::TF32) {
    return "the precision in force asks for IEEE fp32 products, which no fused kernel computes (on fp16 pieces, "
           "precision 'highest', one is as accurate)";
  }
  if (t.m == 0 || t.n == 0 || t.k == 0) {
    return text("the product is empty (M = ", t.m, ", N = ", t.n, ", K = ", t.k, ")");
  }
  if (t.m > kLargestExtent || t.n > kLargestExtent || t.k > kLargestExtent) {
    return text("M, N and K must be at most ", kLargestExtent);
  }
  return std::string();
}

// What the hardware cannot load or store.
std::string not_addressable(const ProblemTraits& t) {
  const int bytes = element_bytes(t.element);
  const auto fits = [&](int64_t elements) { return elements * bytes % kTmaAlignment == 0; };
  if (t.alignment < kTmaAlignment) {
    return text("x, weight or out starts at an address aligned to ", t.alignment, " bytes; fused kernels need ",
                kTmaAlignment);
  }
  if (!fits(t.k)) return misaligned_length("K", t.k, bytes);
  if (!fits(t.n)) return misaligned_length("N", t.n, bytes);
  if (t.x_row_stride < t.k || t.weight_row_stride < t.k) {
    return text("the rows of ", t.x_row_stride < t.k ? "x" : "weight", " overlap (an expanded tensor)");
  }
  if (!fits(t.x_row_stride)) return misaligned_row("x", t.x_row_stride, bytes);
  if (!fits(t.weight_row_stride)) return misaligned_row("weight", t.weight_row_stride, bytes);
  if (!fits(t.out_row_stride)) return misaligned_row("out", t.out_row_stride, bytes);
  if (!t.operands_contiguous) return "a per-column operand is not contiguous";
  return std::string();
}

// --- Cost model -----------------------------------------------------------------------------------------------------

constexpr double kBytesPerMicrosecond = 4.3e6;  // device memory of an H200, all multiprocessors together
constexpr double kLaunchMicroseconds = 5;       // prologue, pipeline fill and the last store

Grid grid_of(const ProblemTraits& t, const sm90::Tile& tile) {
  return {ceil_div(ceil_div(t.m, tile.m), tile.cluster_m), ceil_div(ceil_div(t.n, tile.n), tile.cluster_n)};
}

int ctas_per_cluster(const sm90::Tile& tile) { return tile.cluster_m * tile.cluster_n; }

double traffic_microseconds(const ProblemTraits& t) {
  const double m = static_cast<double>(t.m), n = static_cast<double>(t.n), k = static_cast<double>(t.k);
  return element_bytes(t.element) * (m * k + n * k + m * n) / kBytesPerMicrosecond;
}

const sm90::TileCost& cost_of(const ProblemTraits& t, int index) {
  const sm90::TileCosts& costs = sm90::kTileCosts[index];
  return element_bytes(t.element) == 4 ? costs.in_tf32 : costs.in_16_bits;
}

// How many times longer than at the memory's full speed a kernel takes to stream its operands: measured with one full
// row of tiles (M = 64), with a partly empty one, and with several, each of which reads the weight (M = 128).
double traffic_factor(const ProblemTraits& t, const sm90::Tile& tile) {
  constexpr double kFullRow = 1.35, kPartialRow = 1.55, kSeveralRows = 1.6;
  if (grid_of(t, tile).clusters_m * tile.cluster_m > 1) return kSeveralRows;
  return t.m < tile.m ? kPartialRow : kFullRow;
}

// Whole waves of tiles, each as long as its mainloop and what shows of its epilogue; or memory, where that is longer.
double fused_microseconds(const ProblemTraits& t, int index) {
  const sm90::Tile& tile = sm90::kTiles[index];
  const sm90::TileCost& cost = cost_of(t, index);
  const double products = 1e-6 * tile.m * tile.n * static_cast<double>(t.k);
  const double per_tile = products / cost.products_per_microsecond + cost.epilogue_microseconds;
  const double compute =
      static_cast<double>(waves(grid_of(t, tile).clusters(), ctas_per_cluster(tile), t.multiprocessors)) * per_tile;
  return kLaunchMicroseconds + std::max(compute, traffic_factor(t, tile) * traffic_microseconds(t));
}

int64_t narrow_steps(const ProblemTraits& t) { return ceil_div(t.k * element_bytes(t.element), narrow::kTileKBytes); }

// The tensor cores truncate when they accumulate, and cuBLAS splits long TF32 sums: where it may do so, an accumulator
// of ours takes no more products than its own, or the error on all-positive data would be larger (H200).
constexpr int64_t kLongTF32Sum = 12288, kMostTF32Products = 4096;

bool sums_accurately(const ProblemTraits& t, int splits) {
  const bool is_long = element_bytes(t.element) == 4 && t.k > kLongTF32Sum;
  return !is_long || ceil_div(t.k, splits) <= kMostTF32Products;
}

// Whether a narrow tile is worth a look: no taller than M asks for, a part of K for every CTA, and a place.
bool narrow_suits(const ProblemTraits& t, int index, int splits) {
  const narrow::Tile& tile = narrow::kTiles[index];
  const bool tall_enough = t.m <= tile.m || tile.m >= 64;
  const bool needed = tile.m == 16 || 2 * t.m > tile.m;
  return tall_enough && needed && splits <= narrow_steps(t) &&
         narrow::all_at_once(index, splits, t.m, t.n, t.multiprocessors);
}

// PyTorch's own GEMM adds a bias, and a ReLU with it, at no cost; every other epilogue is a second kernel.
// Adding the ReLU too takes a result without gaps between its rows.
bool second_path_is_one_kernel(const ProblemTraits& t) {
  const bool gaps = t.m > 1 && t.out_row_stride != t.n;
  const bool adds_relu = !gaps && t.n > 1;
  return epigemm::second_path_is_one_kernel(t.epilogue, t.has_bias) && (t.epilogue == EpilogueId::bias || adds_relu);
}

// PyTorch's GEMM, then one elementwise kernel over the output. cuBLAS splits K where tiles are few, so it is modelled
// as perfectly balanced, at the price of adding up the parts.
double modelled_second_path(const ProblemTraits& t) {
  constexpr double kBalancedShare = 0.92, kGemmLaunch = 7, kAddingUp = 1.5, kElementwiseLaunch = 3;
  const double traffic_factor = element_bytes(t.element) == 4 ? 1.1 : 1.0;
  const double products = 1e-6 * static_cast<double>(t.m) * static_cast<double>(t.n) * static_cast<double>(t.k);
  const double compute =
      products / (cost_of(t, 0).products_per_microsecond * kBalancedShare * std::max(1, t.multiprocessors));
  const double elementwise = kElementwiseLaunch + 2.0 * element_bytes(t.element) * static_cast<double>(t.m) *
                                                      static_cast<double>(t.n) / kBytesPerMicrosecond;
  constexpr int64_t kTile = 128, kLongSum = 4096;
  const bool splits = t.k >= kLongSum && ceil_div(t.m, kTile) * ceil_div(t.n, kTile) < t.multiprocessors / 2;
  const double gemm =
      kGemmLaunch + (splits ? kAddingUp : 0) + std::max(compute, traffic_factor * traffic_microseconds(t));
  return second_path_is_one_kernel(t) ? gemm : gemm + elementwise;
}

// Walk across the direction in which the cluster lies: its CTAs already share one operand by multicast, neighbours in
// the walk then share the other through L2.
Plan plan_for(const ProblemTraits& t, int index) {
  const sm90::Tile& tile = sm90::kTiles[index];
  return {index, tile.cluster_m > tile.cluster_n ? Raster::AlongN : Raster::AlongM,
          choose_swizzle(grid_of(t, tile), ctas_per_cluster(tile), t.multiprocessors)};
}

// How many times slower than a fused kernel the second path may be predicted and still be taken. Two kernels must be
// clearly faster to be worth their extra pass. Against a single kernel of cuBLAS the model's error counts the other
// way: in 16 bits, where cuBLAS is within 3% of ours either way, only a clear win is worth leaving what the user had.
double largest_handicap(const ProblemTraits& t) {
  if (!second_path_is_one_kernel(t)) return 0.95;
  return element_bytes(t.element) == 4 ? 1.0 : 1.03;
}

// Both paths as their callers see them. From Python to the GPU a short call waits for its host, and two kernels are two
// calls.
struct Times {
  double fused, second;
};

Times times_to_compare(const ProblemTraits& t, double fused_microseconds) {
  constexpr double kOneCall = 20, kTwoCalls = 30;
  if (second_path_is_one_kernel(t)) return {fused_microseconds, modelled_second_path(t)};
  return {std::max(kOneCall, fused_microseconds), std::max(kTwoCalls, modelled_second_path(t))};
}

bool is_fastest(const ProblemTraits& t, double fused_microseconds) {
  const Times times = times_to_compare(t, fused_microseconds);
  return times.second >= largest_handicap(t) * times.fused;
}

std::string not_fastest(const ProblemTraits& t, double fused_microseconds) {
  if (is_fastest(t, fused_microseconds)) return std::string();
  if (std::isinf(fused_microseconds)) {
    return text("K = ", t.k, " is above ", kLongTF32Sum,
                ", from where on cuBLAS splits K: a TF32 kernel that does not is ", "less accurate than cuBLAS");
  }
  const Times times = times_to_compare(t, fused_microseconds);
  const bool with_relu = t.epilogue == EpilogueId::bias_relu;
  return text(!second_path_is_one_kernel(t) ? "PyTorch's GEMM and one elementwise kernel are expected to be faster ("
              : with_relu ? "PyTorch's GEMM, which adds a bias and ReLU itself, is expected to be at least as fast ("
                          : "PyTorch's GEMM, which adds a bias itself, is expected to be at least as fast (",
              times.second, " us against ", times.fused, " us fused)");
}

// The measured plan was the best at the edge of M's bucket, and its swizzle fitted the grid there.
Plan fitted(const ProblemTraits& t, Plan plan) {
  if (plan.tile < sm90::kTileCount && t.m != tuned::bucket_edge(t.m)) {
    const sm90::Tile& tile = sm90::kTiles[plan.tile];
    plan.swizzle = fitting_swizzle(plan.swizzle, grid_of(t, tile), ctas_per_cluster(tile), t.multiprocessors);
  }
  return plan;
}

std::optional<tuned::Choice> find_measured(const ProblemTraits& t) {
  if (t.device < 0) return std::nullopt;
  tuned::Key key;
  key.epilogue = t.epilogue;
  key.element = t.element;
  key.arithmetic = t.arithmetic;
  key.one_kernel = second_path_is_one_kernel(t);
  key.tf32_allowed = t.element == ElementType::Float32;
  key.n = t.n;
  key.k = t.k;
  key.m = tuned::bucket_edge(t.m);
  std::optional<tuned::Choice> choice = tuned::find(t.device, key);
  // M beyond the last bucket's edge; a table older than what is known of long sums.
  if (choice && (!why_not_planned(t, choice->plan).empty() || !sums_accurately(t, choice->plan.splits))) choice.reset();
  return choice;
}

}  // namespace

bool second_path_is_one_kernel(EpilogueId epilogue, bool has_bias) {
  return epilogue == EpilogueId::bias || (epilogue == EpilogueId::bias_relu && has_bias);
}

double second_path_microseconds(const ProblemTraits& traits) { return modelled_second_path(traits); }

std::string slower_as_measured(const tuned::Choice& choice) {
  return text("PyTorch's own path was measured to be faster (", choice.second_path_microseconds, " us against ",
              choice.fused_microseconds, " us fused)");
}

std::optional<tuned::Choice> measured_choice(const ProblemTraits& traits) {
  std::optional<tuned::Choice> choice = find_measured(traits);
  if (choice && !why_not_covered(traits).empty()) return std::nullopt;
  if (choice) choice->plan = fitted(traits, choice->plan);
  return choice;
}

ProblemTraits traits_of(const Problem& problem) {
  ProblemTraits traits;
  traits.epilogue = problem.epilogue;
  traits.element = problem.element;
  traits.arithmetic = problem.arithmetic;
  traits.m = problem.m;
  traits.n = problem.n;
  traits.k = problem.k;
  traits.x_row_stride = problem.x.row_stride;
  traits.weight_row_stride = problem.weight.row_stride;
  traits.out_row_stride = problem.out.row_stride;
  traits.alignment =
      std::min({alignment_of(problem.x.data), alignment_of(problem.weight.data), alignment_of(problem.out.data)});
  traits.capability = problem.capability;
  traits.multiprocessors = problem.multiprocessors;
  traits.device = problem.capability ? problem.device : -1;
  // Where an epilogue has a bias it is its first operand.
  traits.has_bias = problem.operands[0].data != nullptr;
  const EpilogueInfo& epilogue = epilogue_info(problem.epilogue);
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const OperandValue& value = problem.operands[i - 1];
    if (epilogue.operands[i].kind == OperandKind::PerColumn && value.data && value.stride != 1 && problem.n > 1) {
      traits.operands_contiguous = false;
    }
  }
  return traits;
}

std::string why_not_covered(const ProblemTraits& traits) {
  std::string reason = not_computed(traits);
  return reason.empty() ? not_addressable(traits) : reason;
}

std::string why_not_fused(const ProblemTraits& traits) {
  std::string reason = why_not_covered(traits);
  if (!reason.empty()) return reason;
  if (const std::optional<tuned::Choice> measured = find_measured(traits)) {
    return measured->fused() ? std::string() : slower_as_measured(*measured);
  }
  return not_fastest(traits, best_candidate(traits).microseconds);
}

Decision decide(const ProblemTraits& traits) {
  if (!why_not_covered(traits).empty()) return {};
  if (const std::optional<tuned::Choice> measured = find_measured(traits)) {
    return {measured->fused(), fitted(traits, measured->plan)};
  }
  const Candidate best = best_candidate(traits);
  return {is_fastest(traits, best.microseconds), best.plan};
}

std::string why_not_planned(const ProblemTraits& traits, const Plan& plan) {
  if (!is_narrow(plan.tile)) {
    return plan.splits == 1 ? std::string() : "splits must be 1 for a large tile, got " + std::to_string(plan.splits);
  }
  const narrow::Tile& tile = narrow::kTiles[plan.tile - sm90::kTileCount];
  if (plan.splits > narrow_steps(traits)) return "K is too short for " + std::to_string(plan.splits) + " splits";
  if (ceil_div(traits.m, tile.m) > kMostGridRows || ceil_div(traits.n, tile.n) > kMostGridRows) {
    return "M or N is too large for a narrow tile";
  }
  return std::string();
}

namespace {

// Calls visit(candidate) for every plan worth a look.
template <class Visit>
void visit_candidates(const ProblemTraits& traits, Visit visit) {
  for (int index = 0; index < sm90::kTileCount && sums_accurately(traits, /*splits=*/1); ++index) {
    visit(Candidate{plan_for(traits, index), fused_microseconds(traits, index)});
  }
  for (int index = 0; index < narrow::kTileCount; ++index) {
    for (int splits = 1; splits <= narrow::kMostSplits; splits *= 2) {
      if (!narrow_suits(traits, index, splits) || !sums_accurately(traits, splits)) continue;
      visit(Candidate{{sm90::kTileCount + index, Raster::AlongM, /*swizzle=*/1, splits},
                      narrow::microseconds(index, splits, traits.m, traits.n, narrow_steps(traits),
                                           traffic_microseconds(traits), traits.multiprocessors)});
    }
  }
}

}  // namespace

std::vector<Candidate> rank_candidates(const ProblemTraits& traits) {
  std::vector<Candidate> candidates;
  visit_candidates(traits, [&](const Candidate& candidate) { candidates.push_back(candidate); });
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.microseconds < b.microseconds; });
  return candidates;
}

Candidate best_candidate(const ProblemTraits& traits) {
  Candidate best{{}, std::numeric_limits<double>::infinity()};
  visit_candidates(traits, [&](const Candidate& candidate) {
    if (candidate.microseconds < best.microseconds) best = candidate;
  });
  return best;
}

Candidate invariant_candidate(const ProblemTraits& traits) {
  return {plan_for(traits, sm90::kInvariantTile), fused_microseconds(traits, sm90::kInvariantTile)};
}

}  // namespace epigemm
