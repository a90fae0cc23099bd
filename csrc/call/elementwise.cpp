#include "call/elementwise.h"

#include <algorithm>

#include "call/operands.h"

namespace epigemm::call {
namespace {

// Along which the vectors lie.
int64_t columns_of(const Tensor& x) { return x.dim > 0 ? x.sizes[x.dim - 1] : 1; }

bool fits(const ElementwiseCall& call, ElementwiseProblem* problem) {
  const Tensor& x = *call.x;
  const bool has_vectors = call.bias || call.fold || call.vectors[0];
  if (x.dim > kMaxDimensions || (has_vectors && x.dim == 0)) return false;
  if (call.out) {
    const Tensor& out = *call.out;
    const bool is_alike = out.has_sizes_of(x) && out.element == x.element && out.is_beside(x);
    if (!is_alike || !out.is_dense() || !is_apart(out, x, /*may_be_x=*/true)) return false;
    for (const Tensor* other : {call.bias, call.vectors[0], call.vectors[1], call.scalar}) {
      if (other && !are_apart(out, *other)) return false;
    }
    for (int i = 0; call.fold && i < 6; ++i) {
      if (call.fold->vectors[i] && !are_apart(out, *call.fold->vectors[i])) return false;
    }
  }
  if (call.fold) return fold_fits(*call.fold, x, columns_of(x));
  const Operands given{call.bias, call.vectors, call.scalar, call.has_number, call.number};
  return fill_operands(epilogue_info(call.epilogue), given, x, columns_of(x), problem->operands);
}

void lay_out(const Tensor& x, const Tensor& out, ElementwiseProblem* problem) {
  problem->element = x.element;
  problem->dimensions = x.dim;
  std::copy(x.sizes, x.sizes + x.dim, problem->sizes);
  std::copy(x.strides, x.strides + x.dim, problem->strides[ElementwiseProblem::kX]);
  std::copy(out.strides, out.strides + out.dim, problem->strides[ElementwiseProblem::kOut]);
  const EpilogueInfo& epilogue = epilogue_info(problem->epilogue);
  for (int i = 1; x.dim > 0 && i < epilogue.operand_count; ++i) {
    problem->strides[ElementwiseProblem::kFirstOperand + i - 1][x.dim - 1] = problem->operands[i - 1].stride;
  }
  problem->x = x.data;
  problem->out = out.data;
}

}  // namespace

Answer elementwise(const ElementwiseCall& call, Torch& torch) {
  ElementwiseProblem problem;
  problem.epilogue = call.epilogue;
  const Tensor& x = *call.x;
  if (!is_ready(x)) return Answer::NotReady;
  if (!fits(call, &problem)) return Answer::DoesNotFit;
  void* stream = nullptr;
  if (x.is_cuda() && !torch.stream(&stream)) return Answer::NotReady;
  Tensor out;
  if (!torch.result(&out)) return Answer::Raised;
  if (x.numel() == 0) return Answer::Done;
  if (call.fold) {
    void* const workspace = torch.workspace(fold_bytes(x, columns_of(x)));
    if (!workspace) return Answer::NoMemory;
    run_fold(*call.fold, x, columns_of(x), workspace, stream, problem.operands);
  }
  lay_out(x, out, &problem);
  return run_elementwise(problem, x, torch, stream) ? Answer::Done : Answer::Raised;
}

}  // namespace epigemm::call
