// The planner's one memory: all that decides -> the plan and its time. Ranking takes microseconds, a lookup a tenth of
// one.
#pragma once

#include <optional>

#include "gemm/problem.h"

namespace epigemm::plan_cache {

std::optional<Candidate> find(const Problem& problem);

// `generation`: as it was before the plan was chosen. A plan that was chosen before the last clear() is not kept.
uint64_t generation();
void put(const Problem& problem, const Candidate& candidate, uint64_t generation);

// After anything was measured.
void clear();

}  // namespace epigemm::plan_cache
