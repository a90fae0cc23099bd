#include "gemm/dispatch.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "gemm/grid.h"
#include "gemm/sm90/tile_costs.h"

namespace epigemm {
namespace {

constexpr int kTmaAlignment = 16;  // bytes: what the tensor memory accelerator asks of pointers and row strides

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(address == 0 ? 256 : std::min<uintptr_t>(address & (~address + 1), 256));
}

std::string misaligned_row(const char* argument, int64_t row_stride, int bytes) {
  std::ostringstream reason;
  reason << argument << " has a row stride of " << row_stride << " elements (" << row_stride * bytes
         << " bytes); fused kernels need a multiple of " << kTmaAlignment << " bytes";
  return reason.str();
}

// What the hardware and the kernels cannot do.
std::string not_covered(const ProblemTraits& t) {
  std::ostringstream reason;
  const int bytes = element_bytes(t.element);
  if (!epilogue_info(t.epilogue).linear) {
    reason << "epilogue '" << epilogue_info(t.epilogue).name << "' has no GEMM kernels";
  } else if (t.capability == 0) {
    reason << "the tensors are not on a CUDA device";
  } else if (t.capability / 10 != 9) {
    reason << "fused kernels exist for compute capability 9.0 (Hopper); this device has " << t.capability / 10 << "."
           << t.capability % 10;
  } else if (t.element == ElementType::Float64) {
    reason << "fused kernels exist for float16, bfloat16 and float32 (as TF32), not for float64";
  } else if (t.element == ElementType::Float32 && t.arithmetic != Arithmetic::TF32) {
    reason << "the precision in force asks for IEEE fp32 products, which no fused kernel computes (on fp16 pieces, "
              "precision 'highest', one is as accurate)";
  } else if (t.m == 0 || t.n == 0 || t.k == 0) {
    reason << "the product is empty (M = " << t.m << ", N = " << t.n << ", K = " << t.k << ")";
  } else if (t.m > kLargestExtent || t.n > kLargestExtent || t.k > kLargestExtent) {
    reason << "M, N and K must be at most " << kLargestExtent;
  } else if (t.alignment < kTmaAlignment) {
    reason << "x, weight or out starts at an address aligned to " << t.alignment << " bytes; fused kernels need "
           << kTmaAlignment;
  } else if (t.k * bytes % kTmaAlignment != 0 || t.n * bytes % kTmaAlignment != 0) {
    const bool k = t.k * bytes % kTmaAlignment != 0;
    reason << (k ? "K = " : "N = ") << (k ? t.k : t.n) << " elements are " << (k ? t.k : t.n) * bytes
           << " bytes; fused kernels need rows of a multiple of " << kTmaAlignment << " bytes";
  } else if (t.x_row_stride < t.k || t.weight_row_stride < t.k) {
    reason << "the rows of " << (t.x_row_stride < t.k ? "x" : "weight") << " overlap (an expanded tensor)";
  } else if (t.x_row_stride * bytes % kTmaAlignment != 0) {
    reason << misaligned_row("x", t.x_row_stride, bytes);
  } else if (t.weight_row_stride * bytes % kTmaAlignment != 0) {
    reason << misaligned_row("weight", t.weight_row_stride, bytes);
  } else if (t.out_row_stride * bytes % kTmaAlignment != 0) {
    reason << misaligned_row("out", t.out_row_stride, bytes);
  } else if (!t.operands_contiguous) {
    reason << "a per-column operand is not contiguous";
  }
  return reason.str();
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

// Adding the ReLU too takes a result without gaps between its rows.
bool second_path_is_one_kernel(const ProblemTraits& t) {
  const bool gaps = t.m > 1 && t.out_row_stride != t.n;
  return epigemm::second_path_is_one_kernel(t.epilogue, t.has_bias) && (t.epilogue == EpilogueId::bias || !gaps);
}

// PyTorch's GEMM, then one elementwise kernel over the output. cuBLAS splits K where tiles are few, which our kernels
// do not, so it is modelled as perfectly balanced.
double modelled_second_path(const ProblemTraits& t) {
  constexpr double kBalancedShare = 0.92, kTrafficFactor = 1.35, kGemmLaunch = 5, kElementwiseLaunch = 3;
  const double products = 1e-6 * static_cast<double>(t.m) * static_cast<double>(t.n) * static_cast<double>(t.k);
  const double compute =
      products / (cost_of(t, 0).products_per_microsecond * kBalancedShare * std::max(1, t.multiprocessors));
  const double elementwise = kElementwiseLaunch + 2.0 * element_bytes(t.element) * static_cast<double>(t.m) *
                                                      static_cast<double>(t.n) / kBytesPerMicrosecond;
  const double gemm = kGemmLaunch + std::max(compute, kTrafficFactor * traffic_microseconds(t));
  if (!second_path_is_one_kernel(t)) return gemm + elementwise;
  // Measured on an H200: with the bias and the ReLU, 16 bits from 64 rows on, cuBLAS is 2 to 4% ahead.
  constexpr double kShareOfFused = 0.97;
  constexpr int64_t kLeastRows = 64;
  const bool ahead = t.epilogue == EpilogueId::bias_relu && element_bytes(t.element) == 2 && t.m >= kLeastRows;
  return ahead ? std::min(gemm, kShareOfFused * best_candidate(t).microseconds) : gemm;
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
  return element_bytes(t.element) == 4 ? 1.0 : 1.05;
}

std::string not_fastest(const ProblemTraits& t) {
  // From Python to the GPU: a shorter call waits for its host, and two kernels are two calls.
  constexpr double kOneCall = 20, kTwoCalls = 30;
  const bool one_kernel = second_path_is_one_kernel(t);
  const double fused = std::max(kOneCall, best_candidate(t).microseconds);
  const double second = std::max(one_kernel ? kOneCall : kTwoCalls, modelled_second_path(t));
  if (second >= largest_handicap(t) * fused) return std::string();
  std::ostringstream reason;
  reason.precision(4);
  const bool with_relu = t.epilogue == EpilogueId::bias_relu;
  reason << (!one_kernel ? "PyTorch's GEMM and one elementwise kernel are expected to be faster ("
             : with_relu ? "PyTorch's GEMM, which adds a bias and ReLU itself, is expected to be at least as fast ("
                         : "PyTorch's GEMM, which adds a bias itself, is expected to be at least as fast (")
         << second << " us against " << fused << " us fused)";
  return reason.str();
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
  tuned::Key key;
  key.epilogue = t.epilogue;
  key.element = t.element;
  key.arithmetic = t.arithmetic;
  key.one_kernel = second_path_is_one_kernel(t);
  key.tf32_allowed = t.element == ElementType::Float32;
  key.n = t.n;
  key.k = t.k;
  key.m = tuned::bucket_edge(t.m);
  return t.device < 0 ? std::nullopt : tuned::find(t.device, key);
}

}  // namespace

bool second_path_is_one_kernel(EpilogueId epilogue, bool has_bias) {
  return epilogue == EpilogueId::bias || (epilogue == EpilogueId::bias_relu && has_bias);
}

double second_path_microseconds(const ProblemTraits& traits) { return modelled_second_path(traits); }

std::string slower_as_measured(const tuned::Choice& choice) {
  std::ostringstream reason;
  reason.precision(4);
  reason << "PyTorch's own path was measured to be faster (" << choice.second_path_microseconds << " us against "
         << choice.fused_microseconds << " us fused)";
  return reason.str();
}

std::optional<tuned::Choice> measured_choice(const ProblemTraits& traits) {
  std::optional<tuned::Choice> choice = find_measured(traits);
  if (choice && !not_covered(traits).empty()) return std::nullopt;
  if (choice) choice->plan = fitted(traits, choice->plan);
  return choice;
}

bool is_slower_as_measured(const ProblemTraits& traits) {
  const std::optional<tuned::Choice> measured = find_measured(traits);
  return measured && !measured->fused();
}

Plan chosen_plan(const ProblemTraits& traits) {
  const std::optional<tuned::Choice> measured = find_measured(traits);
  return measured ? fitted(traits, measured->plan) : best_candidate(traits).plan;
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

std::string why_not_covered(const ProblemTraits& traits) { return not_covered(traits); }

std::string why_not_fused(const ProblemTraits& traits) {
  const std::string reason = not_covered(traits);
  if (!reason.empty()) return reason;
  if (const std::optional<tuned::Choice> measured = find_measured(traits)) {
    return measured->fused() ? std::string() : slower_as_measured(*measured);
  }
  return not_fastest(traits);
}

std::vector<Candidate> rank_candidates(const ProblemTraits& traits) {
  std::vector<Candidate> candidates;
  for (int index = 0; index < sm90::kTileCount; ++index) {
    candidates.push_back({plan_for(traits, index), fused_microseconds(traits, index)});
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.microseconds < b.microseconds; });
  return candidates;
}

Candidate best_candidate(const ProblemTraits& traits) {
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int index = 0; index < sm90::kTileCount; ++index) {
    const double microseconds = fused_microseconds(traits, index);
    if (microseconds < least) {
      least = microseconds;
      best = index;
    }
  }
  return {plan_for(traits, best), least};
}

}  // namespace epigemm
