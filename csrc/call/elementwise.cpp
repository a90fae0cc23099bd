#include "call/elementwise.h"

#include <algorithm>
#include <string>

#include "call/decide.h"
#include "call/kernels.h"
#include "call/operands.h"
#include "elementwise/problem.h"
#include "open/slots.h"
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
  return {x, x.element, columns ? x.numel() / columns : 0, columns};
}

bool fits(const ElementwiseCall& call, Problem* problem) {
  const Tensor& x = *call.x;
  const EpilogueInfo& epilogue = epilogue_info(call.epilogue);
  if (is_8_bits(x.element)) return false;
  if (x.dim > kMaxDimensions || (x.dim == 0 && has_vectors(call.operands, epilogue))) return false;
  const Extent extent = extent_of(x);
  problem->epilogue = call.epilogue;
  problem->m = extent.rows;
  problem->n = extent.columns;
  if (call.operands.fold) return fold_fits(*call.operands.fold, x, extent.columns);
  return fill_operands(epilogue, call.operands, extent, problem->operands);
}

// Of x's device, as in Device; 0 of a CPU.
int capability_of([[maybe_unused]] const Tensor& x) {
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) return cuda::device(x.device).capability;
#endif
  return 0;
}

bool is_compute(ElementType element, ElementType x) {
  return element == (x == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32);
}

#if EPIGEMM_WITH_CUDA
void lay_out(const Tensor& x, const Tensor& out, StridedProblem* problem) {
  problem->element = x.element;
  problem->dimensions = x.dim;
  std::copy(x.sizes, x.sizes + x.dim, problem->sizes);
  std::copy(x.strides, x.strides + x.dim, problem->strides[StridedProblem::kX]);
  std::copy(out.strides, out.strides + out.dim, problem->strides[StridedProblem::kOut]);
  if (x.dim > 0) problem->strides[StridedProblem::kColumn][x.dim - 1] = 1;
  problem->x = x.data;
  problem->out = out.data;
}

// A compiled epilogue, with x and out in any layout. Returns what was refused and why, or nullptr.
const char* launch_any(const Problem& problem, const Tensor& x, const Tensor& out, const KernelForms& kernel,
                       void* stream) {
  StridedProblem strided;
  lay_out(x, out, &strided);
  strided.operands = open::by_slot<double>(epilogue_info(problem.epilogue), problem.operands);
  strided.stream = stream;
  if (!has_columns(strided.operands)) std::fill_n(strided.strides[StridedProblem::kColumn], x.dim, 0);
  simplify(strided);
  ElementwiseProblem matrix;
  if (as_matrix(strided, &matrix)) return cuda::launch_elementwise(matrix, kernel);
  strided.multiprocessors = cuda::device(x.device).multiprocessors;
  return cuda::launch_strided(strided, cuda::compiled_kernel(problem.epilogue, ElementwiseKernel::Strided, x.element));
}
#endif

// False after torch.raise().
bool run(const Problem& problem, const Tensor& x, const Tensor& out, const KernelForms& kernel, Torch& torch,
         void* stream) {
#if EPIGEMM_WITH_CUDA
  if (has_compiled_elementwise(problem.epilogue)) {
    return is_launched(launch_any(problem, x, out, kernel, stream), torch);
  }
#endif
  const Matrix from{x.data, x.element, problem.n}, to{out.data, x.element, problem.n};
  return run_elementwise(problem, kernel, from, to, torch, stream);
}

bool sums_fit(const Tensor& sums, const Tensor& x) {
  return x.dim > 0 && sums.dim == 1 && sums.sizes[0] == columns_of(x) && sums.is_contiguous() &&
         sums.element == x.element && sums.is_beside(x);
}

// Compiled kernels give gradients by scalars, beside that by x.
bool is_given(EpilogueId epilogue, int slot) {
  return !has_compiled_elementwise(epilogue) || (slot >= open::kScalar0 && slot < open::kScalar0 + open::kScalars);
}

bool gradient_fits(const Tensor& gradient, const Tensor& x, ElementType element) {
  return gradient.has_sizes_of(x) && gradient.is_contiguous() && gradient.is_beside(x) &&
         (gradient.element == element || is_compute(gradient.element, element));
}

// Whether the tensors fit. grad says which element type the operands have.
bool fits(const DerivativeCall& call, Problem* problem) {
  const Tensor &x = *call.x, &grad = *call.grad;
  if (!grad.has_sizes_of(x) || !grad.is_beside(x)) return false;
  if (x.element != grad.element && (has_compiled_elementwise(call.epilogue) || !is_compute(x.element, grad.element))) {
    return false;
  }
  if (call.sums && (!call.has_result || !sums_fit(*call.sums, x))) return false;
  for (int slot = 0; slot < open::kSlots; ++slot) {
    const Tensor* const gradient = call.of_slot[slot];
    if (gradient && (!is_given(call.epilogue, slot) || !gradient_fits(*gradient, x, grad.element))) return false;
  }
  return fits({call.epilogue, call.grad, call.operands}, problem);
}

// The matrices that are read. False where they are none.
bool read_matrices(const DerivativeCall& call, const Problem& problem, DerivativeProblem* derivative) {
  Matrix grad, x;
  if (!as_matrix(*call.grad, problem.m, problem.n, &grad) || !as_matrix(*call.x, problem.m, problem.n, &x)) {
    return false;
  }
  derivative->element = grad.element;
  derivative->m = problem.m;
  derivative->n = problem.n;
  derivative->grad = grad.data;
  derivative->grad_row_stride = grad.row_stride;
  derivative->acc = x.data;
  derivative->acc_row_stride = x.row_stride;
  derivative->is_acc_of_compute = x.element != grad.element;
  derivative->operands = open::by_slot<double>(epilogue_info(call.epilogue), problem.operands);
  for (int slot = 0; slot < open::kSlots; ++slot) {
    if (const Tensor* const out = call.of_slot[slot]) {
      derivative->of_slot[slot] = {out->data, out->element != grad.element};
    }
  }
  return true;
}

// Allocates memory for the sums of the parts. False if there is none.
bool prepare_sums(DerivativeProblem* problem, Torch& torch) {
  const int bytes = problem->element == ElementType::Float64 ? 8 : 4;
  problem->parts = sum_parts(*problem);
  problem->partial_sums = torch.workspace(problem->parts * problem->n * bytes);
  return problem->partial_sums != nullptr;
}

// False after torch.raise().
bool run([[maybe_unused]] const DerivativeProblem& problem, [[maybe_unused]] const KernelForms& kernel,
         [[maybe_unused]] const Tensor& x, [[maybe_unused]] const Tensor* sums, Torch& torch) {
#if EPIGEMM_WITH_CUDA
  constexpr int kDependentCapability = 90;
  if (!is_launched(cuda::launch_derivative(problem, kernel), torch)) return false;
  if (!sums) return true;
  const MomentStream on{x.device, capability_of(x) >= kDependentCapability, problem.stream};
  return is_launched(
      add_column_parts_cuda({problem.partial_sums, problem.parts, problem.n, sums->element, sums->data}, on), torch);
#else
  return is_launched(kNoCuda, torch);
#endif
}

}  // namespace

Answer elementwise(const ElementwiseCall& call, Torch& torch) {
  const Tensor& x = *call.x;
  if (!is_ready(x)) return Answer::NotReady;
  if (const Answer answer = look_at_out(call); answer != Answer::Done) return answer;
  Problem problem;
  if (!fits(call, &problem)) return Answer::DoesNotFit;
  if (!x.is_cuda() || !are_rows_countable(problem)) return Answer::ByReference;
  const bool are_whole = x.is_contiguous() && (!call.out || call.out->is_contiguous());
  const bool is_readable = are_whole || has_compiled_elementwise(call.epilogue);
  if (!is_readable || (!call.operands.fold && !are_contiguous(problem))) return Answer::NotReadable;
  const KernelForms kernel = elementwise_kernel(call.epilogue, ElementwiseKernel::Value, x.element, capability_of(x));
  if (!kernel.any) return Answer::NotLinked;
  void* stream = nullptr;
  if (!torch.stream(&stream)) return Answer::NotReady;
  Tensor out;
  if (!torch.result(&out)) return Answer::Raised;
  if (x.numel() == 0) return Answer::Done;
  if (call.operands.fold) {
    void* const workspace = torch.workspace(fold_bytes(x, problem.n));
    if (!workspace) return Answer::NoMemory;
    if (!run_fold(*call.operands.fold, x, problem.n, workspace, torch, stream, problem.operands)) {
      return Answer::Raised;
    }
  }
  return run(problem, x, out, kernel, torch, stream) ? Answer::Done : Answer::Raised;
}

Answer derivative(const DerivativeCall& call, Torch& torch) {
  const Tensor& x = *call.x;
  if (!is_ready(x)) return Answer::NotReady;
  if (!x.is_cuda()) return Answer::NotPlain;
  Problem problem;
  if (!fits(call, &problem)) return Answer::DoesNotFit;
  if (!are_rows_countable(problem)) return Answer::ByReference;
  DerivativeProblem derivative;
  if (!are_contiguous(problem) || !read_matrices(call, problem, &derivative)) return Answer::NotReadable;
  const bool is_compiled = has_compiled_elementwise(call.epilogue);
  if (call.sums && !can_sum_columns(derivative, is_compiled)) return Answer::NotReadable;
  const ElementwiseKernel which = call.sums ? ElementwiseKernel::DerivativeSums : ElementwiseKernel::Derivative;
  const KernelForms kernel = elementwise_kernel(call.epilogue, which, derivative.element, capability_of(x));
  if (!kernel.any) return Answer::NotLinked;
  if (!torch.stream(&derivative.stream)) return Answer::NotReady;
  if (call.sums && !prepare_sums(&derivative, torch)) return Answer::NoMemory;
  Tensor out;
  if (call.has_result) {
    if (!torch.result(&out)) return Answer::Raised;
    if (!gradient_fits(out, x, derivative.element) || (is_compiled && out.element != x.element)) {
      return Answer::DoesNotFit;
    }
    derivative.of_acc = {out.data, out.element != derivative.element};
  }
  if (x.numel() == 0) return Answer::Done;
  return run(derivative, kernel, x, call.sums, torch) ? Answer::Done : Answer::Raised;
}

}  // namespace epigemm::call
