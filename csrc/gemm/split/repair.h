// Recomputing what the pieces could not represent: launched behind every GEMM on pieces, and done at once where there
// is nothing to do.
#pragma once

#include "gemm/split/kernels.h"

namespace epigemm::split {

// A finished GEMM on pieces, with the fp32 operands that the pieces were made of.
struct RepairProblem {
  SplitProblem split;
  StridedMatrix x, weight;
};

// Enqueues the repair on the problem's stream. Check cuda::last_error() afterwards.
using Repair = void (*)(RepairProblem const&);

// nullptr when there is no linear form of this epilogue.
Repair find_repair(EpilogueId epilogue);

}  // namespace epigemm::split
