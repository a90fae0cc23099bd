// Copies of matrices in 16 bits that TMA cannot address: rows that are no whole 16 bytes, such addresses, a transposed
// matrix. PyTorch's GEMM is slow with the first two. Plain C++.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/problem.h"

namespace epigemm {

// Of N and K: below it no call is planned on copies, and PyTorch's GEMM counts as wide. Neither model was fitted there:
// the program in which a network's layers of 131072x256x2 and 131072x3x256 were planned on copies took 1.04 ms for it,
// the one before .59 (H100, bf16).
constexpr int64_t kLeastCopied = 32;

// What has to be copied for the kernels. Nothing where something else keeps them from the problem.
Copies copies_for(const Problem& problem);

// What it is for tensors without gaps, by the sizes alone.
Copies copies_for_sizes(const Problem& problem);

// The problem as the kernels see it, on problem.copies. K is a multiple of what TMA loads: zeros lie behind x's and the
// weight's columns. Where the copies lie is not known yet.
Problem on_copies(const Problem& problem);

// Addresses, lengths and strides of what PyTorch's GEMM walks through, in bytes, or-ed: what divides all of them
// divides the result.
int64_t bytes_of_steps(const Problem& problem);

// What making problem.copies is expected to take.
double copies_microseconds(const Problem& problem);

// Bytes of a workspace for problem.copies, from an address that is aligned to as much as PyTorch's.
int64_t copies_bytes(const Problem& problem);

// The addresses of the copies in such a workspace, for `on`, which is on_copies(problem).
void place_copies(const Problem& problem, void* workspace, Problem* on);

// The copies of x and the weight, in words.
std::vector<std::string> describe_copies(const Problem& problem);

}  // namespace epigemm
