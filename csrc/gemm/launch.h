// Launches the plan that the planner chose. Callable without CUDA headers.
#pragma once

#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm {

// Whether this build has the families' kernels.
bool has_gemm_kernels();

// Enqueues a family's kernels on the problem's stream, for a fused plan. `kernels`: those of Family::kernels, with the
// epilogue linked in. Returns nullptr, or what was refused and why.
const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels);

}  // namespace epigemm
