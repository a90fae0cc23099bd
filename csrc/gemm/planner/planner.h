// Which kernel runs a problem, and why not: pure functions of numbers and of what was measured.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gemm/planner/measured.h"
#include "gemm/problem.h"

namespace epigemm {

// Empty when a fused kernel can run the problem; else the reason why not, in words.
std::string why_not_covered(const Problem& problem);

// Empty when, in addition, a fused kernel is as accurate as the arithmetic promises.
std::string why_not_accurate(const Problem& problem);

// Empty when, in addition, it was measured to be at least as fast as the fallback, or else is predicted to be faster by
// the margin for the models' errors.
std::string why_not_fused(const Problem& problem);

// Empty when a covered problem can run under this plan.
std::string why_not_planned(const Problem& problem, const Plan& plan);

// The candidates among the fused plans, the fastest first, by prediction. Meaningful if a fused kernel covers the
// problem.
std::vector<Candidate> rank_candidates(const Problem& problem);

// The predicted time of a fused plan, including the copies on which it runs.
double expected_microseconds(const Problem& problem, const Plan& plan);

// The predicted time without the fused kernel: that of the fallback, or for a pair that of two calls, each of which
// runs on its fastest kernels.
double alternative_microseconds(const Problem& problem);

// Whether measurements of this problem hold for other problems of its sizes, and vice versa.
bool is_tunable(const Problem& problem);

// The measurement for this problem; nothing if there is none, or if its plan does not cover the problem.
std::optional<measured::Choice> find_measured(const Problem& problem);

// How the problem runs: a fused plan where why_not_fused is empty, else the fallback. A batch-invariant problem gets
// its family's one plan, whatever the time. `microseconds`: measured or predicted; infinite for the fallback, which is
// not timed here. Remembered (plan_cache.h).
Candidate choose(const Problem& problem);

inline Plan choose_plan(const Problem& problem) { return choose(problem).plan; }

}  // namespace epigemm
