// Launching what the planner chose. Callable without CUDA headers.
#pragma once

#include "gemm/problem.h"

namespace epigemm {

// Enqueues a family's kernels on the problem's stream. Returns nullptr, or what was refused and why.
using Launch = const char* (*)(Problem const&, Plan const&);

// The same for whichever family the plan names; it is fused.
const char* launch(Problem const& problem, Plan const& plan);

// GEMM kernels of all families in this build.
int gemm_kernel_count();

}  // namespace epigemm
