// The fixup computes again what the slices could not represent. It is launched behind every GEMM on slices, and returns
// at once if there is nothing to do.
#pragma once

#include "gemm/fp16_slices/problem.h"

namespace epigemm::fp16_slices {

// A GEMM on slices, with the fp32 operands from which the slices were made.
struct FixupProblem {
  SplitProblem split;
  StridedMatrix x, weight;
  int block_rows = 0;                  // of the blocks of D whose statistics the GEMM has written (Family::moment_rows)
  bool is_weight_judged_late = false;  // by the GEMM itself, which has read the weight as it lies (weight_scale.h)
};

// When the fixup starts.
enum class FixupStart {
  BesideGemm,  // programmatic dependent launch: while the GEMM works, which lets it; it waits for the GEMM's end itself
  BehindGemm,  // on the stream: kernels for every GPU have no dependent launch
};

// Enqueues the fixup on the problem's stream. `kernel`: with the epilogue in it, a cudaKernel_t. Returns nullptr, or
// what was refused and why.
const char* launch_fixup(FixupProblem const& fixup, const void* kernel, FixupStart start);

// The whole product in IEEE fp32, from operands with any strides; `split.x` and `split.weight` are not read. Its
// results do not depend on M. Batch-invariant calls use it where slices are not accurate enough.
const char* launch_fp32(FixupProblem const& fixup, const void* kernel);

}  // namespace epigemm::fp16_slices
