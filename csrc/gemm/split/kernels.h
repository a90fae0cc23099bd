// The fp32 product on fp16 pieces: the table of its Hopper kernels, one generated unit per epilogue.
#pragma once

#include "gemm/problem.h"
#include "gemm/split/layout.h"

namespace epigemm::split {

// A problem whose operands have been split. `problem.x` and `problem.weight` are not read.
struct SplitProblem {
  Problem problem;
  SplitMatrix x, weight;
};

// Enqueues the GEMM that `plan` names. Returns nullptr, or what CUTLASS refused and why.
using Launch = const char* (*)(SplitProblem const&, Plan const&);

// nullptr when there is no fused kernel for this epilogue. `arithmetic` is Split or Scaled.
Launch find_launch(EpilogueId epilogue, Arithmetic arithmetic);

int kernel_count();

}  // namespace epigemm::split
