// From sums of parts of a matrix's rows to the sum of each column, callable without CUDA headers.
#pragma once

#include "reduce/column_moments.h"

namespace epigemm {

// Contiguous [count, columns] of the arithmetic's type: fp64 of fp64, fp32 of all other types.
struct ColumnParts {
  const void* parts = nullptr;
  int64_t count = 0, columns = 0;
  ElementType element = ElementType::Float32;  // of the matrix, and of `sums`
  void* sums = nullptr;                        // contiguous, rounded once
};

// Enqueues one kernel; nullptr, or what was refused and why. The parts are added in an order that depends on their
// number alone.
const char* add_column_parts_cuda(const ColumnParts& parts, const MomentStream& on);

}  // namespace epigemm
