// Launches the plan that the planner chose. Callable without CUDA headers.
#pragma once

#include "gemm/problem.h"

namespace epigemm {

// Enqueues a family's kernels on the problem's stream; the plan is fused. Returns nullptr, or what was refused and why.
const char* launch(Problem const& problem, Plan const& plan);

}  // namespace epigemm
