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

// Enqueues the repair on the problem's stream. Returns nullptr, or what was refused and why.
using Repair = const char* (*)(RepairProblem const&);

// nullptr when there is no linear form of this epilogue.
Repair find_repair(EpilogueId epilogue);

// The whole product in IEEE fp32, from operands of any strides; `split.x` and `split.weight` are not read. Its results
// do not depend on M: what batch-invariant calls run on where pieces will not do.
Repair find_fp32(EpilogueId epilogue);

// The same by kernels whose epilogue is linked in: cudaKernel_t, as link::find has them.
const char* launch_open_repair(RepairProblem const& repair, const void* kernel);
const char* launch_open_fp32(RepairProblem const& repair, const void* kernel);

}  // namespace epigemm::sm90_fp16x3
