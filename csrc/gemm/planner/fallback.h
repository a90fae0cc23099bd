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

// The predicted time. For a pair of products it is the time of both, with a write and a read of the second one.
double fallback_microseconds(const Problem& problem);

}  // namespace epigemm
