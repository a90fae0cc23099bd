// The kernels of a call.
#pragma once

#include "elementwise/kernels.h"
#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm::call {

// The kernels of a fused plan. For the fallback the elementwise kernel behind PyTorch's GEMM, if the epilogue is
// linked.
open::KernelNames kernels_of(const Problem& problem, const Plan& plan);

// The elementwise kernel of an epilogue: a compiled one, or the one into which it was linked, if it was. `capability`:
// of the GPU, as in Device.
KernelForms elementwise_kernel(EpilogueId epilogue, ElementwiseKernel which, ElementType element, int capability);

}  // namespace epigemm::call
