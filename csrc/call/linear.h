// A linear call from tensors to launches: D = epilogue(x @ weight^T).
#pragma once

#include "call/torch.h"
#include "elementwise/fold.h"

namespace epigemm::call {

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

// What a call pays for the weight's fp16 slices.
enum class SliceCost {
  PerCall,  // they are made at every call, or by this one alone
  None,     // they are there, or made for many calls
  Stale,    // they are made again: by this call alone where it gains from that, else for many calls
};

// The weight's fp16 slices for one arithmetic.
struct WeightSlices {
  SliceCost cost = SliceCost::PerCall;
  bool is_memory_short = false;
  void* pack = nullptr;  // where they are there
};

// What a caller wants to run, in place of what would be decided. The fallback, where the plan is that.
struct ForcedPlan {
  Arithmetic arithmetic = Arithmetic::IEEE;
  Plan plan;
  bool is_fastest = false;  // the fastest of this arithmetic's fused plans, whatever the fallback takes, in its place
};

struct LinearCall {
  EpilogueId epilogue{};
  const Tensor* x = nullptr;
  const Tensor* weight = nullptr;
  const Tensor* weight2 = nullptr;  // of a pair: the epilogue's first matrix, which is absent, is x @ weight2^T
  GivenOperands operands;
  const Tensor* out = nullptr;  // the caller's
  int fp32_order = 0;
  bool needs_other_setting = false;  // PyTorch's GEMM would be less accurate than the call asks for
  WeightSlices split, scaled;
  bool is_strict = false;           // PyTorch's GEMM is no answer
  bool is_batch_invariant = false;  // the same, and M must not choose the kernel
  bool is_out_apart = false;        // `out` is known to share no byte with an argument
  bool is_out_padded = false;       // the kernels may write what is behind the rows of `out`, to whole 16 bytes
  const ForcedPlan* forced = nullptr;
  const Device* described = nullptr;  // of a dry run: a GPU that is not there, in place of x's device

  const WeightSlices& slices(Arithmetic arithmetic) const { return arithmetic == Arithmetic::Split ? split : scaled; }
};

// Makes the call, or says what stands in the way; nothing was launched or written then. Of a dry run (Torch::record)
// nothing is launched or allocated. It goes on behind what can be mended, as if that were.
Answer linear(const LinearCall& call, Torch& torch);

}  // namespace epigemm::call
