// A product whose operands have been split into fp16 slices. Plain C++.
#pragma once

#include "gemm/fp16_slices/layout.h"
#include "gemm/problem.h"

namespace epigemm::fp16_slices {

// `problem.x` and `problem.weight` are not read.
struct SplitProblem {
  Problem problem;
  SplitMatrix x, weight;
  float* remembered_roots = nullptr;  // of a weight that is read as it lies: where the right ones are written, or null
};

inline StridedMatrix strided(Matrix const& matrix, int64_t rows, int64_t columns) {
  return {static_cast<const float*>(matrix.data), rows, columns, matrix.row_stride, matrix.column_stride};
}

// The weights of all groups, of which a problem without groups has one.
inline int64_t weights_of(Problem const& problem) { return problem.groups ? problem.groups.count : 1; }

// Of x's slices beside a weight that is read as it lies.
inline SliceOrder order_beside(Problem const& problem) {
  return problem.is_weight_transposed ? SliceOrder::Plain : SliceOrder::Turned;
}

// 2 for fp16x3, 1 for fp16x1.
constexpr int slices_of(Arithmetic arithmetic) { return arithmetic == Arithmetic::Split ? kSlices : 1; }

}  // namespace epigemm::fp16_slices
