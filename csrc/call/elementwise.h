// An elementwise call from tensors to the launch: D = epilogue(x).
#pragma once

#include "call/linear.h"
#include "open/contract.h"

namespace epigemm::call {

struct ElementwiseCall {
  EpilogueId epilogue{};
  const Tensor* x = nullptr;
  GivenOperands operands;
  const Tensor* out = nullptr;  // the caller's, which may be x itself
  bool is_out_apart = false;    // known to share no byte with another argument, or to be x itself
};

Answer elementwise(const ElementwiseCall& call, Torch& torch);

// grad times the epilogue's derivatives at x. That by x is the call's result, and it may also give the sum of each
// column of it, the gradient of a bias.
struct DerivativeCall {
  EpilogueId epilogue{};
  const Tensor* grad = nullptr;
  const Tensor* x = nullptr;  // of grad's element type; for a linked epilogue also of the arithmetic's
  GivenOperands operands;
  bool has_result = true;
  const Tensor* sums = nullptr;  // contiguous [N] of x's element type
  // By the operand of a slot: contiguous, of x's shape, of grad's element type or the arithmetic's.
  const Tensor* of_slot[open::kSlots] = {};
};

// NotReadable also stands for layouts with which the kernel cannot sum the columns.
Answer derivative(const DerivativeCall& call, Torch& torch);

}  // namespace epigemm::call
