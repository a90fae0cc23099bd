// The fp32 product on fp16 slices: its Hopper kernels.
#pragma once

#include "gemm/fp16_slices/problem.h"

namespace epigemm::sm90_fp16x3 {

// Enqueues the GEMM. `kernel`: the plan's with the epilogue in it, a cudaKernel_t. Returns nullptr, or what was refused
// and why.
const char* launch_gemm(fp16_slices::SplitProblem const& problem, Plan const& plan, const void* kernel);

}  // namespace epigemm::sm90_fp16x3
