// Recomputing what the pieces could not represent: launched behind every GEMM on pieces, and done at once where there
// is nothing to do.
#pragma once

#include "gemm/sm90_fp16x3/kernels.h"

namespace epigemm::sm90_fp16x3 {

// A finished GEMM on pieces, with the fp32 operands that the pieces were made of.
struct RepairProblem {
  SplitProblem split;
  StridedMatrix x, weight;
};

// Enqueues the repair on the problem's stream. `kernel`: with the epilogue in it, a cudaKernel_t. Returns nullptr, or
// what was refused and why.
const char* launch_repair(RepairProblem const& repair, const void* kernel);

// The whole product in IEEE fp32, from operands of any strides; `split.x` and `split.weight` are not read. Its results
// do not depend on M: what batch-invariant calls run on where pieces will not do.
const char* launch_fp32(RepairProblem const& repair, const void* kernel);

}  // namespace epigemm::sm90_fp16x3
