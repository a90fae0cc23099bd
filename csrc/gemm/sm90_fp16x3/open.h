// The kernels on fp16 pieces with an epilogue that was linked in. Callable without CUDA headers.
#pragma once

#include "gemm/sm90_fp16x3/kernels.h"

namespace epigemm::sm90_fp16x3 {

// Enqueues a linked kernel (link/kernels.h). Returns nullptr, or what was refused and why.
const char* launch_open(SplitProblem const& problem, Plan const& plan, const void* kernel);

}  // namespace epigemm::sm90_fp16x3
