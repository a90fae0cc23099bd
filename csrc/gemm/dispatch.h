// Which kernel runs a problem, and why not: pure functions of numbers, the same on a machine without a GPU.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gemm/problem.h"
#include "gemm/tuned.h"

namespace epigemm {

// All that the choice depends on.
struct ProblemTraits {
  EpilogueId epilogue = EpilogueId::bias;
  ElementType element = ElementType::Float16;
  Arithmetic arithmetic = Arithmetic::IEEE;
  int64_t m = 0, n = 0, k = 0;
  int64_t x_row_stride = 0, weight_row_stride = 0, out_row_stride = 0;  // elements
  int alignment = 0;                // bytes: the largest power of two that divides every matrix pointer
  bool operands_contiguous = true;  // every per-column vector has stride 1
  bool has_bias = true;             // only where the epilogue has one does it count
  int capability = 0;
  int multiprocessors = 0;
  int device = -1;  // whose measured choices count; -1: nobody's
};

ProblemTraits traits_of(const Problem& problem);

// A plan and the time that the cost model expects of it.
struct Candidate {
  Plan plan;
  double microseconds = 0;
};

// Empty when a fused kernel can run the problem; else what stands in the way, in words.
std::string why_not_covered(const ProblemTraits& traits);

// Empty when, besides, it was measured, or else is expected, to be at least as fast as PyTorch's own path: its GEMM,
// and one elementwise kernel where the GEMM does not do everything.
std::string why_not_fused(const ProblemTraits& traits);

// What was measured for problems like this one; nothing where no fused kernel covers it. The plan is made to fit.
std::optional<tuned::Choice> measured_choice(const ProblemTraits& traits);

// Whether PyTorch's own path was measured to be faster: why_not_fused's answer without its words, which take longer.
bool is_slower_as_measured(const ProblemTraits& traits);

// The plan that runs where a fused kernel does: the measured one, else best_candidate's.
Plan chosen_plan(const ProblemTraits& traits);

// Whether PyTorch's own path is a single kernel: cuBLAS adds a bias itself, and a ReLU with it.
bool second_path_is_one_kernel(EpilogueId epilogue, bool has_bias);

// What the cost model expects of PyTorch's own path.
double second_path_microseconds(const ProblemTraits& traits);

// Why a measurement speaks against the fused kernels, in words.
std::string slower_as_measured(const tuned::Choice& choice);

// Every tile with its best raster order and swizzle, fastest first. Meaningful where a fused kernel covers the problem.
std::vector<Candidate> rank_candidates(const ProblemTraits& traits);

// The first of rank_candidates, without building the list.
Candidate best_candidate(const ProblemTraits& traits);

}  // namespace epigemm
