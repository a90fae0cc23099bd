// Recomputing what the slices could not represent: launched behind every GEMM on slices, and done at once where there
// is nothing to do.
#pragma once

#include "gemm/sm90_fp16x3/kernels.h"

namespace epigemm::sm90_fp16x3 {

// A finished GEMM on slices, with the fp32 operands that the slices were made of.
struct FixupProblem {
  SplitProblem split;
  StridedMatrix x, weight;
};

// Enqueues the fixup on the problem's stream. `kernel`: with the epilogue in it, a cudaKernel_t. Returns nullptr, or
// what was refused and why.
const char* launch_fixup(FixupProblem const& fixup, const void* kernel);

// The whole product in IEEE fp32, from operands of any strides; `split.x` and `split.weight` are not read. Its results
// do not depend on M: what batch-invariant calls run on where slices will not do.
const char* launch_fp32(FixupProblem const& fixup, const void* kernel);

}  // namespace epigemm::sm90_fp16x3
