// epigemm::_plan: the plan for a problem given in numbers.
#include "torch/plans.h"
#include "epilogue/builtin.h"

#include <algorithm>
#include <sstream>

#include "gemm/planner/fallback.h"
#include "gemm/planner/family.h"
#include "gemm/planner/planner.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::binding {
namespace {

// `measured`: microseconds, 0 if there is only a prediction.
void write_plan(std::ostream& json, const Problem& problem, const Candidate& candidate, double measured) {
  const Plan& plan = candidate.plan;
  const TileText tile = family_of(plan.family).describe(problem, plan.tile);
  const int family = static_cast<int>(plan.family), raster = static_cast<int>(plan.raster);
  json << "\"reads_weight\": " << family_of(plan.family).reads_weight(problem.arithmetic, plan) << ", \"family\": \""
       << family_name(plan.family) << "\", \"tile\": \"" << tile.m << "x" << tile.n << "x" << tile.k
       << "\", \"cluster\": \"" << tile.cluster_m << "x" << tile.cluster_n << "\", \"schedule\": \"" << tile.schedule
       << "\", \"raster\": \"" << (plan.raster == Raster::AlongM ? "along_m" : "along_n")
       << "\", \"swizzle\": " << plan.swizzle << ", \"splits\": " << plan.splits << ", \"plan\": [" << family << ", "
       << plan.tile << ", " << raster << ", " << plan.swizzle << ", " << plan.splits
       << "], \"predicted_us\": " << candidate.microseconds;
  if (measured > 0) json << ", \"measured_us\": " << measured;
  if (tile.shared_bytes > 0) json << ", \"shared_bytes\": " << tile.shared_bytes;
}

// The candidates, the measured plan first.
std::vector<Candidate> with_measured(const Problem& problem, std::vector<Candidate> candidates, const Plan& measured) {
  const auto is_measured = [&](const Candidate& candidate) { return candidate.plan == measured; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_measured), candidates.end());
  candidates.insert(candidates.begin(), {measured, expected_microseconds(problem, measured)});
  return candidates;
}

std::string plan(const Name& epilogue, int64_t m, int64_t n, int64_t k, const List<int64_t>& strides, int64_t alignment,
                 const Name& dtype, const Name& arithmetic, bool is_packed, bool is_tf32_allowed, bool has_bias,
                 bool is_batch_invariant, bool is_any_family_offered, const List<int64_t>& gpu, int64_t device) {
  check(m >= 0 && n >= 0 && k >= 0, "m, n and k must not be negative, got ", m, ", ", n, ", ", k);
  check(strides.values.empty() || strides.values.size() == 3,
        "strides must be empty or those of the rows of x, weight and out, got ", strides.values.size(), " numbers");
  const ElementType element = element_named(dtype);
  const bool is_contiguous = strides.values.empty();
  Problem problem;
  problem.epilogue = epilogue_named(epilogue).id;
  problem.arithmetic = arithmetic_named(arithmetic);
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.x = {nullptr, element, is_contiguous ? k : strides.values[0]};
  problem.weight = {nullptr, element, is_contiguous ? k : strides.values[1]};
  problem.out = {nullptr, element, is_contiguous ? n : strides.values[2]};
  problem.alignment = static_cast<int>(alignment);
  problem.has_bias = has_bias;
  problem.is_packed = is_packed;
  problem.is_weight_readable = element == ElementType::Float32 && problem.weight.row_stride % 4 == 0 && alignment >= 16;
  problem.is_tf32_allowed = is_tf32_allowed;
  problem.is_batch_invariant = is_batch_invariant;
  problem.is_any_family_offered = is_any_family_offered;
  problem.device = described_device(gpu.values, device);
  return plan_json(problem);
}

}  // namespace

std::string plan_json(const Problem& problem, const std::string& more_why_not) {
  const std::string not_covered = more_why_not.empty() ? why_not_covered(problem) : more_why_not;
  const std::string why_not = more_why_not.empty() ? why_not_fused(problem) : more_why_not;
  std::vector<Candidate> candidates;
  std::optional<measured::Choice> found;
  if (not_covered.empty()) {
    found = find_measured(problem);
    candidates = rank_candidates(problem);
    if (found) candidates = with_measured(problem, std::move(candidates), found->plan);
  }
  const auto measured_us = [&](std::size_t i) { return found && i == 0 ? found->fused_microseconds : 0; };
  const bool is_fused = why_not.empty();
  const bool is_unknown = problem.is_empty() || problem.device.multiprocessors == 0;
  const bool is_one_kernel = is_unknown || is_fallback_expected_in_one_kernel(problem);
  std::ostringstream json;
  json << std::boolalpha << "{\"fused\": " << is_fused << ", \"why_not\": \"" << why_not
       << "\", \"why_not_covered\": \"" << not_covered << "\", \"source\": \"" << (found ? "cache" : "model")
       << "\", \"fallback_us\": " << alternative_microseconds(problem)
       << ", \"is_fallback_one_kernel\": " << is_one_kernel
       << ", \"is_speed_assumed\": " << problem.device.is_speed_assumed;
  if (found) json << ", \"fallback_measured_us\": " << found->fallback_microseconds;
  if (is_fused) {
    json << ", ";
    write_plan(json, problem, candidates.front(), measured_us(0));
  }
  json << ", \"candidates\": [";
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    json << (i ? ", {" : "{");
    write_plan(json, problem, candidates[i], measured_us(i));
    json << "}";
  }
  json << "]}";
  return json.str();
}

Device described_device(const std::vector<int64_t>& gpu, int64_t index) {
  constexpr std::size_t kMostNumbers = 6;
  check(gpu.size() <= kMostNumbers && gpu.size() % 2 == 0,
        "gpu must be empty or [capability, multiprocessors], then perhaps clock_mhz and memory_bytes_per_us, then "
        "perhaps l2_bytes and has_half_rate_sums, got ",
        gpu.size(), " numbers");
  check(index >= -1 && index < measured::kMostDevices, "device must be the index of a CUDA device or -1, got ", index);
#if EPIGEMM_WITH_CUDA
  if (gpu.empty() && index >= 0) return cuda::device(static_cast<int>(index));
#endif
  Device device;
  device.index = static_cast<int>(index);
  if (gpu.size() >= 2) {
    constexpr int64_t kMost = 1 << 16;
    check(gpu[1] > 0 && gpu[1] <= kMost, "multiprocessors must be in 1..", kMost, ", got ", gpu[1]);
    device.capability = static_cast<int>(gpu[0]);
    device.multiprocessors = static_cast<int>(gpu[1]);
  }
  if (gpu.size() >= 4) {
    device.clock_mhz = static_cast<double>(gpu[2]);
    device.memory_bytes_per_us = static_cast<double>(gpu[3]);
  }
  if (gpu.size() == kMostNumbers) {
    device.l2_bytes = static_cast<double>(gpu[4]);
    device.has_half_rate_sums = gpu[5] != 0;
  }
  return with_assumed_speed(device);
}

ElementType element_named(const Name& name) {
  for (ElementType element :
       {ElementType::Float16, ElementType::BFloat16, ElementType::Float32, ElementType::Float64}) {
    if (name.text() == element_name(element)) return element;
  }
  fail("dtype '", name.text(), "' is unknown; there are float16, bfloat16, float32, float64");
}

}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_plan", TORCH_BOX(&epigemm::binding::plan));
}
