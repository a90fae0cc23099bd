// D = epilogue(x) on a CPU: one vectorised loop over the functors, compiled for several instruction sets.
#pragma once

#include "elementwise/problem.h"

namespace epigemm::cpu {

// Computes elements [begin, end) of the problem, in the order of its axes. One of each per epilogue and instruction
// set.
struct Kernels {
  void (*forward)(const ElementwiseProblem& problem, int64_t begin, int64_t end);    // simplified
  void (*derivative)(const DerivativeProblem& problem, int64_t begin, int64_t end);  // contiguous
};

// Runs body(begin, end, context) over slices of [begin, end) in parallel; the binding passes torch's own, so that
// torch's thread settings hold.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain,
                             void (*body)(int64_t begin, int64_t end, void* context), void* context);

// The instruction set in use, the best that this machine's processor has: "baseline", "x86_64_v3" or "x86_64_v4".
const char* level();

// Computes the whole simplified problem.
void run(const ElementwiseProblem& problem, ParallelFor parallel_for);

// Computes the whole contiguous problem.
void run_derivative(const DerivativeProblem& problem, ParallelFor parallel_for);

}  // namespace epigemm::cpu
