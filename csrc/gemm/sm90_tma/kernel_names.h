// Which of the large tiles' kernels a problem takes. Free of CUDA.
#pragma once

#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm::sm90_tma {

// Whether the first matrix of the epilogue can come by TMA: of x's element type, rows and address as TMA asks. Then the
// kernel to link is the one that loads it so.
bool has_matrix_by_tma(Problem const& problem);

// Whether the epilogue reads a matrix at all.
bool reads_matrix(const EpilogueInfo& epilogue);

open::KernelName kernel_name(ElementType element, int tile, bool has_matrix_by_tma);

}  // namespace epigemm::sm90_tma
