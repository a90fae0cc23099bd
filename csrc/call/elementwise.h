// An elementwise call from tensors to the launch: D = epilogue(x).
#pragma once

#include "call/linear.h"
#include "elementwise/problem.h"

namespace epigemm::call {

struct ElementwiseCall {
  EpilogueId epilogue{};
  const Tensor* x = nullptr;
  GivenOperands operands;
  const Tensor* out = nullptr;  // the caller's, which may be x itself
  bool is_out_apart = false;    // known to share no byte with another argument, or to be x itself
};

Answer elementwise(const ElementwiseCall& call, Torch& torch);

// grad times the epilogue's derivative at x. On a GPU it may also give the sum of each column of the result, the
// gradient of a bias: for `sums`, contiguous [N] of x's element type.
struct DerivativeCall {
  EpilogueId epilogue{};
  const Tensor* grad = nullptr;
  const Tensor* x = nullptr;
  GivenOperands operands;
  const Tensor* sums = nullptr;
};

// NotReadable also stands for layouts with which the kernel cannot sum the columns.
Answer derivative(const DerivativeCall& call, Torch& torch);

}  // namespace epigemm::call
