// D = epilogue(x), element by element: the arguments that the binding passes to the CUDA kernels.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"

namespace epigemm {

constexpr int kMaxDimensions = 64;  // torch's own limit

// Every tensor of the problem as base pointer + strides over one index space: out, x, then the per-column operands,
// which have stride 0 along all axes but the last.
struct ElementwiseProblem {
  static constexpr int kOut = 0, kX = 1, kFirstOperand = 2;
  static constexpr int kTensors = kFirstOperand + kMaxBuiltinOperands;

  EpilogueId epilogue{};
  ElementType element = ElementType::Float32;
  int dimensions = 0;
  int64_t sizes[kMaxDimensions] = {};
  int64_t strides[kTensors][kMaxDimensions] = {};  // elements; the last axis is the fastest
  void* out = nullptr;
  const void* x = nullptr;
  OperandValue operands[kMaxBuiltinOperands];
  int multiprocessors = 0;
  void* stream = nullptr;  // cudaStream_t

  int64_t elements() const {
    int64_t product = 1;
    for (int axis = 0; axis < dimensions; ++axis) product *= sizes[axis];
    return product;
  }
};

// grad_x = grad * d epilogue(x) / dx, into out; grad, x and out contiguous.
struct DerivativeProblem : ElementwiseProblem {
  const void* grad = nullptr;
  // Sums of out's columns over `chunks` parts of the rows, as they are stored: [chunks, columns] of the arithmetic's
  // type. Null: not wanted. May be given if can_sum_columns().
  void* partial_sums = nullptr;
  int64_t chunks = 0;

  int64_t columns() const { return sizes[dimensions - 1]; }
  int64_t rows() const { return elements() / columns(); }
};

// Whether the derivative's kernel can also sum the columns: all rows, and the operands, are whole aligned vectors.
// `out` is a new tensor.
bool can_sum_columns(const DerivativeProblem& problem);

// Into how many parts its kernel divides the rows: enough of them for a GPU, each with rows enough.
int64_t sum_chunks(const DerivativeProblem& problem);

// Drops axes of size 1, orders the rest by out's strides and merges axes that lie behind one another without gaps in
// every tensor, so that the kernels have as few axes as possible: a contiguous problem has one axis in the end, or two
// if it has per-column operands.
void simplify(ElementwiseProblem& problem);

// After simplify: one or two axes, x and out contiguous over both, per-column operands contiguous along the last.
bool is_contiguous(const ElementwiseProblem& problem);

}  // namespace epigemm
