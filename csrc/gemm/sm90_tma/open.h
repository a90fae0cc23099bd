// The large tiles with an epilogue that was linked in. Free of CUDA.
#pragma once

#include "gemm/problem.h"

namespace epigemm::sm90_tma {

// Whether the first matrix of the epilogue can come by TMA: of x's element type, rows and address as TMA asks. Then the
// kernel to link is the one that loads it so.
bool has_matrix_by_tma(Problem const& problem);

// Enqueues a linked kernel (link/kernels.h). Returns nullptr, or what was refused and why.
const char* launch_open(Problem const& problem, Plan const& plan, const void* kernel);

}  // namespace epigemm::sm90_tma
