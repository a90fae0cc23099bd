// The fp32 product on fp16 slices: the arguments of its Hopper kernels.
#pragma once

#include "gemm/problem.h"
#include "gemm/sm90_fp16x3/layout.h"

namespace epigemm::sm90_fp16x3 {

// A problem whose operands have been split. `problem.x` and `problem.weight` are not read.
struct SplitProblem {
  Problem problem;
  SplitMatrix x, weight;
};

inline StridedMatrix strided(Matrix const& matrix, int64_t rows, int64_t columns) {
  return {static_cast<const float*>(matrix.data), rows, columns, matrix.row_stride, matrix.column_stride};
}

// 2 for fp16x3, 1 for fp16x1.
constexpr int slices_of(Arithmetic arithmetic) { return arithmetic == Arithmetic::Split ? kSlices : 1; }

// Enqueues the GEMM. `kernel`: the plan's with the epilogue in it, a cudaKernel_t. Returns nullptr, or what was refused
// and why.
const char* launch_gemm(SplitProblem const& problem, Plan const& plan, const void* kernel);

}  // namespace epigemm::sm90_fp16x3
