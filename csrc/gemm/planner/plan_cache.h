// The planner's only cache: from everything on which a plan depends to the plan and its time. Ranking takes
// microseconds, a lookup a tenth of one.
#pragma once

#include <optional>

#include "gemm/problem.h"

namespace epigemm::plan_cache {

std::optional<Candidate> find(const Problem& problem);

// `generation`: its value before the plan was chosen. A plan that was chosen before the last clear() is not kept.
uint64_t generation();
void put(const Problem& problem, const Candidate& candidate, uint64_t generation);

// To be called after something was measured.
void clear();

}  // namespace epigemm::plan_cache
