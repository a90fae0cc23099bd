// A linear call from tensors to launches: D = epilogue(x @ weight^T).
#pragma once

#include "call/torch.h"
#include "elementwise/fold.h"

namespace epigemm::call {

constexpr int kFoldVectors = 6;

// scale and inference BatchNorm, to be folded into multiplier and offset: absent vectors are null.
struct FoldVectors {
  const Tensor* vectors[kFoldVectors] = {};  // bias, scale, running_mean, running_var, bn_weight, bn_bias
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

// The weight's fp16 slices for one arithmetic.
struct WeightSlices {
  bool is_memory_short = false;
  void* pack = nullptr;  // null if there is none, and the weight is read as it lies or split by this call
};

// A plan to run in place of the decision. It may be the fallback.
struct ForcedPlan {
  Arithmetic arithmetic = Arithmetic::IEEE;
  Plan plan;
  bool is_fastest = false;  // run this arithmetic's fastest fused plan instead, whatever the fallback takes
};

// What a product of 8-bit numbers has besides: fp32 scales, each 0-d or, without gaps, one number for each row of x
// ([M], [M, 1]) or of the weight ([N], [1, N]); or both of blocks, [M, ceil(K / 128)] and [ceil(N / 128), ceil(K /
// 128)], of any strides. They are factors of the sums. A pair's second weight has numbers behind the first one's.
struct EightBits {
  const Tensor *x_scale = nullptr, *weight_scale = nullptr;  // null for other types
  ElementType result = ElementType::BFloat16;
  // Of a result in 8 bits: by which it is divided, a number or 0-d fp32. Or it has a scale for each 128 columns of a
  // row: contiguous [ceil(N / 128), M] in fp32, which receives them.
  GivenOperand out_scale;
};

struct LinearCall {
  EpilogueId epilogue{};
  const Tensor* x = nullptr;
  const Tensor* weight = nullptr;
  EightBits eight_bits;
  // int32 [E]: rows of x are in groups that end there, each with a weight of its own; weights are [E, N, K] then, and
  // vectors along N [E, N]. Null with such weights: x is [E, M, K].
  const Tensor* group_ends = nullptr;
  const Tensor* weight2 = nullptr;  // of a pair: x @ weight2^T is the epilogue's first matrix, which is not given
  GivenOperands operands;
  const Tensor* out = nullptr;  // the caller's
  // Contiguous [2, N] in fp32 (fp64 of fp64), on a GPU: receives the mean and the biased variance of each column of D,
  // of the numbers as they are stored.
  const Tensor* column_moments = nullptr;
  // With `column_moments`, or null: contiguous [blocks, N, 2] of their type. If the rows make no more blocks than that,
  // their moments are left here, else they are merged.
  const Tensor* column_blocks = nullptr;
  int* left_rows = nullptr;  // receives the rows of a block whose moments are left there; 0: none are
  // Like a new result: receives the second values of an epilogue that has them. Only fused kernels store it.
  const Tensor* stored = nullptr;
  int fp32_order = 0;
  bool needs_other_setting = false;  // PyTorch's GEMM would be less accurate than the call asks for
  WeightSlices split, scaled;
  bool is_strict = false;           // must not run on PyTorch's GEMM
  bool is_batch_invariant = false;  // the same, and the kernel must not depend on M
  bool is_out_apart = false;        // `out` is known to share no byte with an argument
  bool is_out_padded = false;       // kernels may write the padding behind the rows of `out`, up to whole 16 bytes
  const ForcedPlan* forced = nullptr;
  const Device* described = nullptr;  // for a dry run: a GPU that is only described, in place of x's device

  bool is_8_bits() const { return eight_bits.x_scale; }
  ElementType result_element() const { return is_8_bits() ? eight_bits.result : x->element; }
  // Of the operands that have the result's type; a result of 8 bits has bf16's.
  ElementType operand_element() const {
    return epigemm::is_8_bits(result_element()) ? ElementType::BFloat16 : result_element();
  }
  const WeightSlices& slices(Arithmetic arithmetic) const { return arithmetic == Arithmetic::Split ? split : scaled; }
};

// Makes the call, or returns the reason why not. In the second case nothing was launched or written. A dry run
// (Torch::record) launches and allocates nothing. It continues after reasons that Python can deal with, as if it had.
Answer linear(const LinearCall& call, Torch& torch);

}  // namespace epigemm::call
