// The functions of this module that the entry calls, which is a module of its own.
#pragma once

#include "call/elementwise.h"
#include "call/forced.h"
#include "call/recorded.h"

namespace epigemm::call {

struct Functions {
  Answer (*linear)(const LinearCall& call, Torch& torch);
  Answer (*elementwise)(const ElementwiseCall& call, Torch& torch);
  Answer (*derivative)(const DerivativeCall& call, Torch& torch);
  Answer (*recorder_of)(const LinearCall& call);
  void (*read_slices)(int64_t bits, LinearCall* call);
  std::string (*read_forced)(const int64_t* numbers, std::size_t count, bool is_pair, ForcedPlan* forced);
};

}  // namespace epigemm::call
