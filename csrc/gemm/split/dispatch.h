// Whether an fp32 problem runs on fp16 pieces, and by which kernel: pure functions of numbers, like gemm/dispatch.h.
#pragma once

#include <string>
#include <vector>

#include "gemm/dispatch.h"

namespace epigemm::split {

// All that the choice depends on. Strides and alignment play no part: the pieces are laid out by us.
struct SplitTraits {
  EpilogueId epilogue = EpilogueId::bias;
  Arithmetic arithmetic = Arithmetic::Split;  // or Scaled
  int64_t m = 0, n = 0, k = 0;
  bool packed = false;  // the weight's pieces are there already
  int capability = 0;
  int multiprocessors = 0;
};

// Empty when the kernels can run the problem at the accuracy that the arithmetic promises; else what stands in the way.
std::string why_not_covered(const SplitTraits& traits);

// Empty when, besides, the call is expected to be faster than cuBLAS's fp32 GEMM and an elementwise kernel (Split) or
// than its TF32 one (Scaled).
std::string why_not_fused(const SplitTraits& traits);

// Every tile with its best raster order and swizzle, fastest first. The times are those of the whole call: splitting x
// (and a weight that is not packed), the GEMM, and the look at the guard.
std::vector<Candidate> rank_candidates(const SplitTraits& traits);
Candidate best_candidate(const SplitTraits& traits);

// What the user had: the GEMM of PyTorch in the same precision, then one elementwise kernel.
double second_path_microseconds(const SplitTraits& traits);

}  // namespace epigemm::split
