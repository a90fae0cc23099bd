// The open kernels of a linear call.
#pragma once

#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm::call {

// The kernels of a fused plan. For the fallback the elementwise kernel behind PyTorch's GEMM, if the epilogue is
// linked.
open::KernelNames kernels_of(const Problem& problem, const Plan& plan);

}  // namespace epigemm::call
