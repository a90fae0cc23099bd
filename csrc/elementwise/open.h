// D = epilogue(x) and its derivatives by kernels into which the epilogue was linked. Callable without CUDA headers.
//
// Everything is a row-major matrix of m rows and n columns: leading axes have been flattened. Both axes may have any
// size; where one is 0, nothing is launched.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"
#include "open/contract.h"
#include "open/kernel_names.h"

namespace epigemm::cuda {

// What the epilogue reads, by slot. Scalars count as doubles beside fp64 elements, as floats beside the others.
using OpenOperands = open::Operands<double>;

// `out` may be x itself, or a matrix that is read; other overlaps are not allowed.
struct OpenElementwise {
  ElementType element = ElementType::Float32;  // of x and out
  int64_t m = 0, n = 0;
  const void* x = nullptr;
  int64_t x_row_stride = 0;  // elements
  void* out = nullptr;
  int64_t out_row_stride = 0;
  OpenOperands operands{};
  void* stream = nullptr;  // cudaStream_t
};

// Where derivatives by the operand of a slot go, and those by the accumulator (slot -1).
struct OpenGradient {
  void* out = nullptr;         // m rows of n without gaps; null = not wanted
  bool is_of_compute = false;  // fp32 (fp64 beside fp64) rather than x's element type
};

// gradient of a slot = grad * d epilogue / d slot, one value for every element: the caller sums over rows or columns. 0
// wherever that derivative is 0, whatever grad is.
struct OpenDerivative {
  ElementType element = ElementType::Float32;  // of x
  int64_t m = 0, n = 0;
  const void* grad = nullptr;  // of x's element type
  int64_t grad_row_stride = 0;
  const void* acc = nullptr;
  int64_t acc_row_stride = 0;
  bool is_acc_of_compute = false;  // fp32 (fp64 beside fp64) rather than x's element type
  OpenGradient of_acc;
  OpenGradient of_slot[open::kSlots];  // of operands that the epilogue reads; those of others are not written
  OpenOperands operands{};
  void* stream = nullptr;
};

// The open kernels of these functions, by the element type of x.
open::KernelName elementwise_kernel(ElementType element);
open::KernelName derivative_kernel(ElementType element);

// `kernel`: a cudaKernel_t, with the epilogue in it. They return nullptr, or what was refused and why.
const char* launch_open_elementwise(const OpenElementwise& problem, const void* kernel);
const char* launch_open_derivative(const OpenDerivative& problem, const void* kernel);

}  // namespace epigemm::cuda
