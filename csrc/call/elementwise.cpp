#include "call/elementwise.h"

#include <algorithm>
#include <string>

#include "call/decide.h"
#include "call/operands.h"
#include "elementwise/kernels.h"
#include "link/kernels.h"
#include "reduce/column_sums.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#include "elementwise/launch.h"
#endif

namespace epigemm::call {
namespace {

// Along which the vectors lie.
int64_t columns_of(const Tensor& x) { return x.dim > 0 ? x.sizes[x.dim - 1] : 1; }

bool has_vectors(const GivenOperands& operands, const EpilogueInfo& epilogue) {
  if (operands.fold) return true;
  for (int i = 0; i < operands.count && i + 1 < epilogue.operand_count; ++i) {
    if (operands.values[i].tensor && epilogue.operands[i + 1].kind != OperandKind::Scalar) return true;
  }
  return false;
}

// Done, or why the result cannot be written to the caller's `out`.
Answer look_at_out(const ElementwiseCall& call) {
  if (!call.out) return Answer::Done;
  const Tensor &x = *call.x, &out = *call.out;
  if (!out.has_sizes_of(x) || out.element != x.element || !out.is_beside(x)) return Answer::DoesNotFit;
  const bool is_known_apart =
      call.is_out_apart || (out.is_dense() && is_apart(out, x, call.operands, /*may_be_x=*/true));
  return is_known_apart ? Answer::Done : Answer::MayOverlap;
}

Extent extent_of(const Tensor& x) {
  const int64_t columns = columns_of(x);
  return {x, columns ? x.numel() / columns : 0, columns};
}

bool fits(const ElementwiseCall& call, ElementwiseProblem* problem) {
  const Tensor& x = *call.x;
  const EpilogueInfo& epilogue = epilogue_info(call.epilogue);
  if (x.dim > kMaxDimensions || (x.dim == 0 && has_vectors(call.operands, epilogue))) return false;
  if (call.operands.fold) return fold_fits(*call.operands.fold, x, columns_of(x));
  return fill_operands(epilogue, call.operands, extent_of(x), problem->operands);
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

// Of x's device, as in Device; 0 of a CPU.
int capability_of([[maybe_unused]] const Tensor& x) {
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) return cuda::device(x.device).capability;
#endif
  return 0;
}

// Runs the kernel into which the epilogue was linked.
Answer elementwise_linked(const ElementwiseCall& call, const open::KernelNames& names, Torch& torch) {
  const Tensor& x = *call.x;
  const Extent extent = extent_of(x);
  Problem problem;
  problem.epilogue = call.epilogue;
  problem.m = extent.rows;
  problem.n = extent.columns;
  if (x.dim == 0) return Answer::DoesNotFit;
  if (!fill_operands(epilogue_info(call.epilogue), call.operands, extent, problem.operands)) return Answer::DoesNotFit;
  if (!x.is_cuda() || !are_rows_countable(problem)) return Answer::ByReference;
  const bool is_out_contiguous = !call.out || call.out->is_contiguous();
  if (!x.is_contiguous() || !is_out_contiguous || !are_contiguous(problem)) return Answer::NotReadable;
  open::Kernels kernels;
  if (!link::find(call.epilogue, capability_of(x), names, &kernels)) return Answer::NotLinked;
  void* stream = nullptr;
  if (!torch.stream(&stream)) return Answer::NotReady;
  Tensor out;
  if (!torch.result(&out)) return Answer::Raised;
  const Matrix from{x.data, x.element, extent.columns}, to{out.data, x.element, extent.columns};
  return run_linked(problem, kernels.handles[0], from, to, torch, stream) ? Answer::Done : Answer::Raised;
}

// Vectors without gaps, which the kernels of derivatives read.
bool are_dense(const EpilogueInfo& epilogue, const GivenOperands& operands) {
  for (int i = 0; i < operands.count; ++i) {
    const Tensor* const tensor = operands.values[i].tensor;
    const bool is_scalar = epilogue.operands[i + 1].kind == OperandKind::Scalar;
    if (tensor && !is_scalar && !tensor->is_contiguous()) return false;
  }
  return true;
}

bool sums_fit(const Tensor& sums, const Tensor& x) {
  return x.dim > 0 && sums.dim == 1 && sums.sizes[0] == columns_of(x) && sums.is_contiguous() &&
         sums.element == x.element && sums.is_beside(x);
}

// Allocates memory for the sums of the parts. False if there is none.
bool prepare_sums(DerivativeProblem* problem, Torch& torch) {
  const int bytes = problem->element == ElementType::Float64 ? 8 : 4;
  problem->chunks = sum_chunks(*problem);
  problem->partial_sums = torch.workspace(problem->chunks * problem->columns() * bytes);
  return problem->partial_sums != nullptr;
}

#if EPIGEMM_WITH_CUDA
// The error, or empty.
std::string launch_derivative(const DerivativeProblem& problem, const Tensor& x, const Tensor* sums) {
  constexpr int kDependentCapability = 90;
  cuda::launch_derivative(problem);
  const std::string error = cuda::last_error();
  if (!error.empty() || !sums) return error;
  const MomentStream on{x.device, capability_of(x) >= kDependentCapability, problem.stream};
  const char* const refused =
      add_column_parts_cuda({problem.partial_sums, problem.chunks, problem.columns(), problem.element, sums->data}, on);
  return refused ? refused : "";
}
#endif

// False after torch.raise().
bool run_derivative([[maybe_unused]] const DerivativeProblem& problem, [[maybe_unused]] const Tensor& x,
                    [[maybe_unused]] const Tensor* sums, Torch& torch) {
#if EPIGEMM_WITH_CUDA
  const std::string error = launch_derivative(problem, x, sums);
  if (!error.empty()) torch.raise(("the kernel could not be launched: " + error).c_str());
  return error.empty();
#else
  torch.raise(kNoCuda);
  return false;
#endif
}

}  // namespace

Answer elementwise(const ElementwiseCall& call, Torch& torch) {
  if (!is_ready(*call.x)) return Answer::NotReady;
  if (const Answer answer = look_at_out(call); answer != Answer::Done) return answer;
  const open::KernelNames names = elementwise_kernels(call.epilogue, call.x->element);
  if (names.count > 0) return elementwise_linked(call, names, torch);
  ElementwiseProblem problem;
  problem.epilogue = call.epilogue;
  const Tensor& x = *call.x;
  if (!fits(call, &problem)) return Answer::DoesNotFit;
  if (!x.is_cuda()) return Answer::ByReference;
  void* stream = nullptr;
  if (!torch.stream(&stream)) return Answer::NotReady;
  Tensor out;
  if (!torch.result(&out)) return Answer::Raised;
  if (x.numel() == 0) return Answer::Done;
  if (call.operands.fold) {
    void* const workspace = torch.workspace(fold_bytes(x, columns_of(x)));
    if (!workspace) return Answer::NoMemory;
    const FoldVectors& fold = *call.operands.fold;
    if (!run_fold(fold, x, columns_of(x), workspace, torch, stream, problem.operands)) return Answer::Raised;
  }
  lay_out(x, out, &problem);
  return run_elementwise(problem, x, torch, stream) ? Answer::Done : Answer::Raised;
}

Answer derivative(const DerivativeCall& call, Torch& torch) {
  constexpr int64_t kMostColumns = int64_t(1) << 30;  // which the kernels count in 32 bits
  const Tensor &x = *call.x, &grad = *call.grad;
  if (!is_ready(x)) return Answer::NotReady;
  if (!x.is_cuda() || elementwise_kernels(call.epilogue, x.element).count > 0) return Answer::NotPlain;
  DerivativeProblem problem;
  problem.epilogue = call.epilogue;
  if (!grad.has_sizes_of(x) || grad.element != x.element || !grad.is_beside(x)) return Answer::DoesNotFit;
  if (!fits({call.epilogue, call.x, call.operands}, &problem)) return Answer::DoesNotFit;
  if (call.sums && !sums_fit(*call.sums, x)) return Answer::DoesNotFit;
  const bool is_dense = x.is_contiguous() && grad.is_contiguous();
  if (!is_dense || columns_of(x) > kMostColumns || !are_dense(epilogue_info(call.epilogue), call.operands)) {
    return Answer::NotReadable;
  }
  lay_out(x, x, &problem);
  if (problem.dimensions == 0) problem.sizes[problem.dimensions++] = 1;
  problem.grad = grad.data;
  if (call.sums && !can_sum_columns(problem)) return Answer::NotReadable;
  if (!torch.stream(&problem.stream)) return Answer::NotReady;
  if (call.sums && !prepare_sums(&problem, torch)) return Answer::NoMemory;
  Tensor out;
  if (!torch.result(&out)) return Answer::Raised;
  problem.out = out.data;
  if (x.numel() == 0) return Answer::Done;
  return run_derivative(problem, x, call.sums, torch) ? Answer::Done : Answer::Raised;
}

}  // namespace epigemm::call
