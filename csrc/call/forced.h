// What callers say of a linear call in numbers: circumstances, its weight's slices, and a plan in place of a decision.
#pragma once

#include <cstddef>
#include <string>

#include "call/linear.h"

namespace epigemm::call {

// What is known of a call that was looked at before: a sum of these.
enum Circumstances {
  kRouted = 1,           // autograd, tracers and modes are done with the call: nobody asks for them
  kOutApart = 2,         // `out` shares no byte with an argument
  kOutPadded = 4,        // the kernels may write what is behind the rows of `out`, to whole 16 bytes
  kOtherSetting = 8,     // PyTorch's setting would make its GEMM less accurate than the call asks for
  kRaisesShortage = 16,  // the call ends in the error where there is no memory for a workspace
};

// Four bits for split, then four for scaled: the cost (2), whether memory is short, whether the pack is there.
void read_slices(int64_t bits, LinearCall* call);

// [arithmetic]: the fastest of its fused plans. [arithmetic, family, tile, raster, swizzle, splits]: that plan,
// family -1 being the fallback. Only a plan that is named runs a family which has not been run on its GPUs yet
// (Family::is_offered): tests name it. `is_pair`: of a pair of products, whose kernels run by such a plan alone. Empty
// where it is one; else what is wrong, in words.
std::string read_forced(const int64_t* numbers, std::size_t count, bool is_pair, ForcedPlan* forced);

}  // namespace epigemm::call
