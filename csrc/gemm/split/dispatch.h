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
  bool packed = false;        // the weight's pieces are there already
  bool tf32_allowed = false;  // to PyTorch's GEMM, which would take over
  bool has_bias = true;       // only where the epilogue has one does it count
  int capability = 0;
  int multiprocessors = 0;
  int device = -1;  // whose measured choices count; -1: nobody's
};

// Empty when the kernels can run the problem; else what stands in the way.
std::string why_not_possible(const SplitTraits& traits);

// Empty when they do so at the accuracy that the arithmetic promises.
std::string why_not_accurate(const SplitTraits& traits);

// Empty when, besides both, the call was measured, or else is expected, to be faster than PyTorch's own path.
std::string why_not_fused(const SplitTraits& traits);

// As in gemm/dispatch.h.
std::optional<tuned::Choice> measured_choice(const SplitTraits& traits);
Plan chosen_plan(const SplitTraits& traits);

// Every tile with its best raster order and swizzle, fastest first. The times are those of the whole call: splitting x
// (and a weight that is not packed), the GEMM, and the look at the guard.
std::vector<Candidate> rank_candidates(const SplitTraits& traits);
Candidate best_candidate(const SplitTraits& traits);

// The plan of a batch-invariant call, as epigemm::invariant_candidate.
Candidate invariant_candidate(const SplitTraits& traits);

// What the user had: PyTorch's GEMM, in TF32 where that is allowed, then one elementwise kernel.
double second_path_microseconds(const SplitTraits& traits);

}  // namespace epigemm::split
