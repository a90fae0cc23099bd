// The open kernels of a linear call.
#pragma once

#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm::call {

// Those of a fused plan; else the one of the epilogue alone, where it is linked, which follows PyTorch's GEMM.
open::KernelNames kernels_of(const Problem& problem, const Plan& plan);

}  // namespace epigemm::call
