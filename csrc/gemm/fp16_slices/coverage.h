// Which products on fp16 slices are accurate, and what they need: the same for every family. Plain C++.
#pragma once

#include <string>

#include "gemm/problem.h"

namespace epigemm::fp16_slices {

// Whether the problem's arithmetic and element types are those of products on slices.
bool computes(const Problem& problem);

// Why slices cannot hold the operands; empty if they can. Strides and alignment do not matter, because the layout of
// the slices is our own.
std::string why_not_sizes(const Problem& problem);

// Why the result is less accurate than the arithmetic promises; empty if it is not.
std::string why_not_accurate(const Problem& problem);

// Of problem.workspace: the slices of x, and those of a weight without a pack.
int64_t workspace_bytes(const Problem& problem);

// The same where the weight is read as it lies.
int64_t workspace_bytes_as_it_lies(const Problem& problem);

// Why it cannot be; empty if it can.
std::string why_not_as_it_lies(const Problem& problem);

}  // namespace epigemm::fp16_slices
