// The swap-AB kernels whose epilogue is linked in. Callable without CUDA headers.
#pragma once

#include "gemm/problem.h"

namespace epigemm::sm90_swap_ab {

// `kernel`: the plan's tile for the problem's element type, a cudaKernel_t (link::find). Returns nullptr, or what was
// refused and why.
const char* launch_open(Problem const& problem, Plan const& plan, const void* kernel);

}  // namespace epigemm::sm90_swap_ab
