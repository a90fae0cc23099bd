// The fallback: PyTorch's GEMM, which is cuBLAS's, and one elementwise kernel where it does not do everything.
#pragma once

#include "gemm/problem.h"

namespace epigemm {

// Whether cuBLAS's GEMM can compute the whole epilogue: it can add a bias, and apply a ReLU behind a bias.
bool is_fallback_one_kernel(EpilogueId epilogue, bool has_bias);

// The same for a problem: for the ReLU the result's rows must have no gaps between them.
bool is_fallback_one_kernel(const Problem& problem);

// Whether, in addition, one kernel is predicted to be no slower than two.
bool is_fallback_expected_in_one_kernel(const Problem& problem);

// Two consecutive kernels take so many microseconds less than the sum of their times, because the second starts while
// the first ends.
constexpr double kSharedStartUs = 2.5;

// The predicted time of a problem that is no pair of products.
double fallback_microseconds(const Problem& problem);

}  // namespace epigemm
