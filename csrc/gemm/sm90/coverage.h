// The conditions of Hopper's kernels on a problem. A condition that is not met is returned as text. Without CUDA.
#pragma once

#include <string>

#include "gemm/problem.h"

namespace epigemm::sm90 {

// Empty on a Hopper device.
std::string why_not_on(const Device& device);

// The families' reason for a batch of products.
constexpr const char* kOneProduct = "fused kernels compute one product a launch";

// Empty if the matrices are row-major, with sizes that fit the kernels' integers, and the epilogue's vectors have no
// gaps.
std::string why_not_matrices(const Problem& problem);

// Empty if the lengths and addresses of rows are multiples of 16 bytes.
std::string why_not_whole_vectors(const Problem& problem);

// Both conditions: TMA can load and store the matrices.
std::string why_not_addressable(const Problem& problem);

// Whether kernels that multiply the tensors themselves have this arithmetic: 16 bits, or fp32 as TF32.
bool multiplies_as_stored(const Problem& problem);

// The epilogue's first matrix that shares no rows, of a pair behind its first one, if TMA can load it: it has the
// results' element type, and rows and address are aligned. Without data if it cannot, or if the epilogue reads none.
Matrix matrix_by_tma(const Problem& problem);

// The tensor cores truncate when they accumulate, and cuBLAS splits long TF32 sums. Where it may do so, our accumulator
// must not take more products than its own, or the error on all-positive data would be larger (H200). Empty if that
// holds with K in `splits` parts.
std::string why_sums_are_too_long(const Problem& problem, int splits);

}  // namespace epigemm::sm90
