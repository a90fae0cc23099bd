// Properties of a linear call that callers pass as numbers: circumstances, the weight's slices, and a forced plan.
#pragma once

#include <cstddef>
#include <string>

#include "call/linear.h"

namespace epigemm::call {

// What a caller knows of a call: a sum of these.
enum Circumstances {
  kRouted = 1,           // autograd, tracers and modes have handled the call, and are not checked again
  kOutApart = 2,         // `out` shares no byte with an argument
  kOutPadded = 4,        // kernels may write the padding behind the rows of `out`, up to whole 16 bytes
  kOtherSetting = 8,     // PyTorch's setting would make its GEMM less accurate than the call asks for
  kRaisesShortage = 16,  // without memory for a workspace the call raises the error
  kCast = 32,            // autocast casts none of the tensors, or has
};

// Two bits for split, then two for scaled: whether memory is short, and, of a dry run, whether there is a pack.
void read_slices(int64_t bits, LinearCall* call);

// Reads a forced plan: [arithmetic] stands for the fastest of its fused plans, [arithmetic, family, tile, raster,
// swizzle, splits] for that plan, where family -1 is the fallback. Where calls never choose a family
// (Problem::is_any_family_offered), it only runs by a plan of the second form. `is_pair`: for a pair of products, whose
// kernels also need such a plan. Returns an empty text, or what is wrong.
std::string read_forced(const int64_t* numbers, std::size_t count, bool is_pair, ForcedPlan* forced);

}  // namespace epigemm::call
