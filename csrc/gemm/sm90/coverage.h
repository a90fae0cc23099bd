// The conditions that Hopper's kernels set on a problem. A condition that is not met is returned in words. Free of
// CUDA.
#pragma once

#include <string>

#include "gemm/problem.h"

namespace epigemm::sm90 {

// Empty on a Hopper device.
std::string why_not_on(const Device& device);

// What the families say of a batch of products.
constexpr const char* kOneProduct = "fused kernels compute one product a launch";

// Empty where the matrices lie in rows, of sizes that kernels count with, and the epilogue's vectors have no gaps.
std::string why_not_matrices(const Problem& problem);

// Empty where rows are whole 16 bytes, and begin at such an address.
std::string why_not_whole_vectors(const Problem& problem);

// Both: TMA can load and store the matrices as they are.
std::string why_not_addressable(const Problem& problem);

// Whether the kernels on the tensors as they are multiply in this arithmetic: 16 bits, or fp32 as TF32.
bool multiplies_as_stored(const Problem& problem);

// The epilogue's first matrix, or a pair's second one, where TMA can load it: of the results' element type, rows and
// address as TMA asks. Without data where it cannot, or where the epilogue reads none.
Matrix matrix_by_tma(const Problem& problem);

// The tensor cores truncate when they accumulate, and cuBLAS splits long TF32 sums: where it may do so, an accumulator
// of ours takes no more products than its own, or the error on all-positive data would be larger (H200). Empty where
// that holds with K in `splits` parts.
std::string why_sums_are_too_long(const Problem& problem, int splits);

}  // namespace epigemm::sm90
