// Plans as JSON, for _plan and _dry_linear.
#pragma once

#include <string>
#include <vector>

#include "gemm/problem.h"
#include "torch/arguments.h"

namespace epigemm::binding {

// The planner's answer for a problem: {"fused", "why_not", "why_not_covered", "source": "model" or "cache",
// "fallback_us", "is_fallback_one_kernel", "is_speed_assumed", "candidates"} and, where fused, the members of the plan
// that runs. `why_not`: a further reason of the caller.
std::string plan_json(const Problem& problem, const std::string& why_not = "");

// [capability, multiprocessors, then perhaps clock_mhz and memory_bytes_per_us, then perhaps l2_bytes and
// has_half_rate_sums] as a device; empty: the CUDA device `index`.
Device described_device(const std::vector<int64_t>& gpu, int64_t index);

ElementType element_named(const Name& name);

}  // namespace epigemm::binding
