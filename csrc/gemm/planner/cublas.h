// What cuBLAS is expected to take, as PyTorch calls it. Plain C++.
#pragma once

#include "gemm/problem.h"

namespace epigemm::cublas {

// The product alone (torch.mm), or with a bias and perhaps a ReLU in it (torch.addmm, torch._addmm_activation). For
// fp32 problems in TF32 where that is allowed, else in plain fp32.
double product_microseconds(const Problem& problem);
double product_with_bias_microseconds(const Problem& problem);

// Whether an fp32 problem is multiplied in plain fp32.
bool is_plain_fp32(const Problem& problem);

}  // namespace epigemm::cublas
