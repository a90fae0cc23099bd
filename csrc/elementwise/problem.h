// D = epilogue(x) and its derivatives, element by element: what calls pass to the CUDA kernels.
//
// Nearly everything is a row-major matrix of m rows and n columns: leading axes have been flattened. Both axes may have
// any size; where one is 0, nothing is launched.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"
#include "open/contract.h"

namespace epigemm {

// What the epilogue reads, by slot. Scalars count as doubles beside fp64 elements, as floats beside the others.
using SlotOperands = open::Operands<double>;

// `out` may be x itself, or a matrix that is read; other overlaps are not allowed.
struct ElementwiseProblem {
  ElementType element = ElementType::Float32;  // of x and out
  int64_t m = 0, n = 0;
  const void* x = nullptr;
  int64_t x_row_stride = 0;  // elements
  void* out = nullptr;
  int64_t out_row_stride = 0;
  SlotOperands operands{};
  void* stream = nullptr;  // cudaStream_t
};

// Where derivatives by the operand of a slot go, and those by the accumulator (slot -1).
struct Gradient {
  void* out = nullptr;         // m rows of n without gaps; null = not wanted
  bool is_of_compute = false;  // fp32 (fp64 beside fp64) rather than x's element type
};

// gradient of a slot = grad * d epilogue / d slot, one value for every element. 0 wherever that derivative is 0,
// whatever grad is.
struct DerivativeProblem {
  ElementType element = ElementType::Float32;  // of grad
  int64_t m = 0, n = 0;
  const void* grad = nullptr;
  int64_t grad_row_stride = 0;
  const void* acc = nullptr;
  int64_t acc_row_stride = 0;
  bool is_acc_of_compute = false;  // fp32 (fp64 beside fp64) rather than grad's element type; of linked epilogues
  Gradient of_acc;
  Gradient of_slot[open::kSlots];  // of operands that the epilogue reads; those of others are not written
  SlotOperands operands{};
  // Sums of the columns of the accumulator's gradient over `parts` of the rows, as it is stored: [parts, n] of the
  // arithmetic's type. Null: not wanted. May be given if can_sum_columns(), with that gradient.
  void* partial_sums = nullptr;
  int64_t parts = 0;
  void* stream = nullptr;
};

// In which order threads pass over a matrix.
struct Walk {
  int64_t m, n;
  int64_t period;  // see Frame in kernel.cuh
  bool is_wide;
  bool is_whole;  // see Parts there
};

Walk walk_of(const ElementwiseProblem& problem);
Walk walk_of(const DerivativeProblem& problem);

// Whether a kernel can also sum the columns: all rows, and the vectors, are whole aligned vectors. A compiled
// epilogue's (`is_compiled`) does so for rows without gaps, beside no other gradient.
bool can_sum_columns(const DerivativeProblem& problem, bool is_compiled);

// Whether no other gradient is wanted.
bool is_of_accumulator_alone(const DerivativeProblem& problem);

// Into how many parts that kernel divides the rows: enough of them for a GPU, each with rows enough.
int64_t sum_parts(const DerivativeProblem& problem);

constexpr int kMaxDimensions = 64;  // torch's own limit

// D = epilogue(x) with x and out in any layout, and no operands but vectors of columns and scalars.
struct StridedProblem {
  static constexpr int kOut = 0, kX = 1, kColumn = 2, kTensors = 3;

  ElementType element = ElementType::Float32;
  int dimensions = 0;
  int64_t sizes[kMaxDimensions] = {};
  // Elements; the last axis is the fastest. kColumn: of the vectors, 1 along x's last axis.
  int64_t strides[kTensors][kMaxDimensions] = {};
  const void* x = nullptr;
  void* out = nullptr;
  SlotOperands operands{};
  int multiprocessors = 0;
  void* stream = nullptr;

  int64_t elements() const {
    int64_t product = 1;
    for (int axis = 0; axis < dimensions; ++axis) product *= sizes[axis];
    return product;
  }
};

bool has_columns(const SlotOperands& operands);

// Drops axes of size 1, orders the rest by out's strides and merges axes that lie behind one another without gaps in
// every tensor, so that there are as few axes as possible.
void simplify(StridedProblem& problem);

// After simplify: the same as a matrix. False if it is none.
bool as_matrix(const StridedProblem& problem, ElementwiseProblem* matrix);

}  // namespace epigemm
