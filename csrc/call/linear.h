// A linear call from tensors to launches: D = epilogue(x @ weight^T).
#pragma once

#include "call/torch.h"
#include "elementwise/fold.h"

namespace epigemm::call {

// What a call may do with its weight's pack.
enum class PackUse { Keep, Find, None };

// scale and inference BatchNorm, to be folded into multiplier and offset: absent vectors are null.
struct FoldVectors {
  const Tensor* vectors[6] = {};  // bias, scale, running_mean, running_var, bn_weight, bn_bias
  double eps = 0;
};

// One operand of an epilogue: a tensor, or a scalar by value, or nothing.
struct GivenOperand {
  const Tensor* tensor = nullptr;
  double number = 0;
  bool has_number = false;

  bool is_absent() const { return !tensor && !has_number; }
};

// The operands of an epilogue as a call gives them, in its order.
struct GivenOperands {
  GivenOperand values[kMaxOperands];
  int count = 0;
  const FoldVectors* fold = nullptr;  // in place of them
};

struct LinearCall {
  EpilogueId epilogue{};
  const Tensor* x = nullptr;
  const Tensor* weight = nullptr;
  GivenOperands operands;
  const Tensor* out = nullptr;  // the caller's
  int fp32_order = 0;
  bool needs_other_setting = false;  // PyTorch's GEMM would be less accurate than the call asks for
  void* pack = nullptr;              // the weight's fp16 slices, for the first arithmetic of the order
  PackUse pack_use = PackUse::None;
  bool is_strict = false;           // PyTorch's GEMM is no answer
  bool is_batch_invariant = false;  // the same, and M must not choose the kernel
};

Answer linear(const LinearCall& call, Torch& torch);

}  // namespace epigemm::call
