// The operands of an epilogue and the BatchNorm fold, for linear and elementwise calls alike.
#pragma once

#include "call/linear.h"
#include "elementwise/kernels.h"
#include "gemm/problem.h"

namespace epigemm::call {

constexpr char kNoCuda[] = "epigemm was built without CUDA";

// The shape of a call's result as a matrix. Operands are broadcast to it.
struct Extent {
  const Tensor& x;
  ElementType element;  // of the result, and of the operands that follow it
  int64_t rows, columns;
  bool is_pair = false;     // of products: the first matrix is absent
  int64_t group_count = 0;  // each with vectors along the columns of its own; 0: the rows are in no groups
};

// Fills one value for each operand of the epilogue, in its order. False if the given operands do not fit.
bool fill_operands(const EpilogueInfo& epilogue, const GivenOperands& given, const Extent& extent,
                   OperandValue* values);

// Whether kernels can tell which row of a matrix each row of the result reads (SharedRows in csrc/open/contract.h).
bool are_rows_countable(const Problem& problem);

// Whether vectors and eps fit.
bool fold_fits(const FoldVectors& fold, const Tensor& x, int64_t columns);

// How much of a workspace the fold takes.
int64_t fold_bytes(const Tensor& x, int64_t columns);

// Folds into a workspace, and sets scale_batch_norm's operands to it. False after torch.raise().
bool run_fold(const FoldVectors& fold, const Tensor& x, int64_t columns, void* workspace, Torch& torch, void* stream,
              OperandValue* values);

// Runs an elementwise kernel on a matrix. The operands are those of `problem`, vectors without gaps. `out` may be x.
// False after torch.raise().
bool run_elementwise(const Problem& problem, const KernelForms& kernel, const Matrix& x, const Matrix& out,
                     Torch& torch, void* stream);

// False after torch.raise(), where there was a reason against a launch.
bool is_launched(const char* refused, Torch& torch);

// Whether `out` shares no byte with x or an operand; `may_be_x`: or is x itself.
bool is_apart(const Tensor& out, const Tensor& x, const GivenOperands& operands, bool may_be_x);

// Whether kernels run on x's device. For a GPU, Python has made the device known and loaded what was measured on it.
bool is_ready(const Tensor& x);
void set_ready(int device);

}  // namespace epigemm::call
