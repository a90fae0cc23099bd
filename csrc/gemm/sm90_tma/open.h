// Which of the large tiles' kernels a problem takes. Free of CUDA.
#pragma once

#include "gemm/problem.h"

namespace epigemm::sm90_tma {

// Whether the first matrix of the epilogue can come by TMA: of x's element type, rows and address as TMA asks. Then the
// kernel to link is the one that loads it so.
bool has_matrix_by_tma(Problem const& problem);

}  // namespace epigemm::sm90_tma
