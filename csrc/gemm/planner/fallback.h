// The fallback: PyTorch's GEMM, which is cuBLAS's, and one elementwise kernel where it does not do everything.
#pragma once

#include "gemm/problem.h"

namespace epigemm {

// Whether an epilogue may be a part of cuBLAS's GEMM: it adds a bias itself, and applies a ReLU behind a bias.
bool is_fallback_one_kernel(EpilogueId epilogue, bool has_bias);

// The same for a problem: adding the ReLU takes a result without gaps between its rows.
bool is_fallback_one_kernel(const Problem& problem);

// Whether, besides, one kernel is expected to be no slower than two.
bool is_fallback_expected_in_one_kernel(const Problem& problem);

// The predicted time. Of a pair of products: of both, the second one written and read.
double fallback_microseconds(const Problem& problem);

}  // namespace epigemm
