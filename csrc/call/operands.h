// The operands of an epilogue and the BatchNorm fold, for linear and elementwise calls alike.
#pragma once

#include "call/linear.h"

namespace epigemm::call {

// The shape of a call's result as a matrix. Operands are broadcast to it.
struct Extent {
  const Tensor& x;
  int64_t rows, columns;
  bool is_pair = false;  // of products: the first matrix is absent
};

// One value per operand of the epilogue, in its order. False where what is given does not fit.
bool fill_operands(const EpilogueInfo& epilogue, const GivenOperands& given, const Extent& extent,
                   OperandValue* values);

// Whether vectors and eps fit.
bool fold_fits(const FoldVectors& fold, const Tensor& x, int64_t columns);

// How much of a workspace the fold takes.
int64_t fold_bytes(const Tensor& x, int64_t columns);

// Folds into a workspace, and has scale_batch_norm's operands read it. False after torch.raise().
bool run_fold(const FoldVectors& fold, const Tensor& x, int64_t columns, void* workspace, Torch& torch, void* stream,
              OperandValue* values);

// Runs a filled problem, simplified here. False after torch.raise().
bool run_elementwise(ElementwiseProblem& problem, const Tensor& x, Torch& torch, void* stream);

// The same by the kernel that the epilogue was linked into, from its operands by `problem`. `out` may be x.
bool run_linked(const Problem& problem, const void* kernel, const Matrix& x, const Matrix& out, Torch& torch,
                void* stream);

// Puts -0, which changes no sum, in the place of a linked epilogue's bias: for a 16-bit product that has it already.
// `memory`: room for N elements. False after torch.raise().
bool replace_bias(void* memory, Torch& torch, Problem* problem);

// Whether `out` shares no byte with x or an operand; `may_be_x`: or is x itself.
bool is_apart(const Tensor& out, const Tensor& x, const GivenOperands& operands, bool may_be_x);

// Device kernels run there: the device was looked at by the cold path, which has loaded what was measured on it.
bool is_ready(const Tensor& x);
void set_ready(int device);

}  // namespace epigemm::call
