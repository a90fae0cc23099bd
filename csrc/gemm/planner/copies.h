// Copies of 16-bit matrices that TMA cannot address: with rows or addresses that are not multiples of 16 bytes, or
// transposed. With the first two PyTorch's GEMM is slow. Plain C++.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/problem.h"

namespace epigemm {

// With a smaller N or K no call is planned on copies or by elements, and PyTorch's GEMM is modelled as one that loads
// 16 bytes. No model was fitted there: a program that planned a network's layers of 131072x256x2 and 131072x3x256 on
// copies took 1.04 ms, and the one before it 0.59 (H100, bf16).
constexpr int64_t kLeastCopied = 32;

// The matrices that have to be copied for the kernels. None if the kernels cannot run the problem for another reason.
Copies copies_for(const Problem& problem);

// The same for tensors without gaps, which depends on the sizes alone.
Copies copies_for_sizes(const Problem& problem);

// The problem that the kernels run, on problem.copies. K is rounded up to a multiple of what TMA loads, because x's and
// the weight's columns are padded with zeros. The copies have no addresses yet.
Problem on_copies(const Problem& problem);

// The addresses, row lengths and strides of PyTorch's GEMM, in bytes, combined by `or`: a power of two that divides all
// of them divides the result.
int64_t bytes_of_steps(const Problem& problem);

// The predicted time for making problem.copies.
double copies_microseconds(const Problem& problem);

// Bytes of a workspace for problem.copies, whose address is aligned as PyTorch's are.
int64_t copies_bytes(const Problem& problem);

// Sets the addresses of the copies in such a workspace in `on`, which is on_copies(problem).
void place_copies(const Problem& problem, void* workspace, Problem* on);

// The copies of x and the weight, in words.
std::vector<std::string> describe_copies(const Problem& problem);

}  // namespace epigemm
