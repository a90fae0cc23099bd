// A problem's operands, for an open kernel.
#pragma once

#include "gemm/problem.h"
#include "open/slots.h"

namespace epigemm {

inline open::Operands<float> operands_of(const Problem& problem) {
  return open::by_slot<float>(epilogue_info(problem.epilogue), problem.operands);
}

}  // namespace epigemm
