// epigemm::_derivative_out and _fold_batch_norm_out.
#include "elementwise/fold.h"
#include "torch/arguments.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#include "elementwise/launch.h"

namespace epigemm::binding {
namespace {

void fill_problem(const Name& epilogue_name, const TensorView& x, const std::optional<TensorView>& bias,
                  const List<TensorView>& operands, const List<double>& scalars, const TensorView& out,
                  ElementwiseProblem& problem) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  problem.epilogue = epilogue.id;
  problem.element = element_of(x, "x");
  check(element_of(out, "out") == problem.element, "out must have x's dtype");
  check(out.is_beside(x), "out must be on x's device");
  problem.dimensions = static_cast<int>(x.dim());
  check(problem.dimensions <= kMaxDimensions, "x has ", problem.dimensions, " dimensions, at most ", kMaxDimensions,
        " are supported");
  bool same_shape = out.dim() == x.dim();
  for (int axis = 0; same_shape && axis < problem.dimensions; ++axis) {
    same_shape = out.size(axis) == x.size(axis);
    problem.sizes[axis] = x.size(axis);
    problem.strides[ElementwiseProblem::kX][axis] = x.stride(axis);
    problem.strides[ElementwiseProblem::kOut][axis] = out.stride(axis);
  }
  check(same_shape, "out has shape ", Shape{out}, ", expected x's, ", Shape{x});
  const int last = problem.dimensions - 1;
  fill_operands(epilogue, x, last >= 0 ? problem.sizes[last] : 1, bias, operands, scalars, problem.operands);
  for (int i = 1; last >= 0 && i < epilogue.operand_count; ++i) {
    problem.strides[ElementwiseProblem::kFirstOperand + i - 1][last] = problem.operands[i - 1].stride;
  }
  problem.x = x.data();
  problem.out = out.mutable_data();
}

DerivativeProblem make_derivative(const Name& epilogue, const TensorView& grad, const TensorView& x,
                                  const std::optional<TensorView>& bias, const List<TensorView>& operands,
                                  const List<double>& scalars, const TensorView& out) {
  DerivativeProblem problem;
  fill_problem(epilogue, x, bias, operands, scalars, out, problem);
  check(element_of(grad, "grad") == problem.element, "grad must have x's dtype");
  check(grad.is_beside(x), "grad must be on x's device");
  bool same_shape = grad.dim() == x.dim();
  for (int axis = 0; same_shape && axis < problem.dimensions; ++axis) same_shape = grad.size(axis) == x.size(axis);
  check(same_shape, "grad has shape ", Shape{grad}, ", expected x's, ", Shape{x});
  check(grad.is_contiguous() && x.is_contiguous() && out.is_contiguous(), "grad, x and out must be contiguous");
  for (int i = 1; i < epilogue_info(problem.epilogue).operand_count; ++i) {
    const OperandValue& operand = problem.operands[i - 1];
    check(!operand.data || operand.stride <= 1, "vectors must be contiguous");
  }
  if (problem.dimensions == 0) problem.sizes[problem.dimensions++] = 1;
  constexpr int64_t kMostColumns = int64_t(1) << 30;  // which the kernels count in 32 bits
  check(problem.sizes[problem.dimensions - 1] <= kMostColumns, "x has more than 2^30 columns");
  problem.grad = grad.data();
  return problem;
}

FoldProblem make_fold(const std::optional<TensorView>& bias, const std::optional<TensorView>& scale,
                      const std::optional<TensorView>& running_mean, const std::optional<TensorView>& running_var,
                      const std::optional<TensorView>& bn_weight, const std::optional<TensorView>& bn_bias, double eps,
                      const TensorView& out) {
  check(out.dim() == 2 && out.size(0) == 2 && out.is_contiguous(), "out must be contiguous of shape [2, N], got ",
        Shape{out});
  FoldProblem problem;
  problem.element = element_of(out, "out");
  check(problem.element == ElementType::Float32 || problem.element == ElementType::Float64,
        "out must be float32 or float64");
  problem.bias = vector_of(bias, out.size(1), out, "bias");
  problem.scale = vector_of(scale, out.size(1), out, "scale");
  problem.mean = vector_of(running_mean, out.size(1), out, "running_mean");
  problem.variance = vector_of(running_var, out.size(1), out, "running_var");
  problem.gamma = vector_of(bn_weight, out.size(1), out, "bn_weight");
  problem.beta = vector_of(bn_bias, out.size(1), out, "bn_bias");
  problem.eps = eps;
  problem.columns = out.size(1);
  problem.multiplier = out.mutable_data();
  problem.offset = static_cast<char*>(problem.multiplier) + problem.columns * element_bytes(problem.element);
  return problem;
}

void check_launched() {
  const std::string error = cuda::last_error();
  check(error.empty(), "the kernel could not be launched: ", error);
}

void derivative_out(const Name& epilogue, const TensorView& grad, const TensorView& x,
                    const std::optional<TensorView>& bias, const List<TensorView>& operands,
                    const List<double>& scalars, const TensorView& out) {
  DerivativeProblem problem = make_derivative(epilogue, grad, x, bias, operands, scalars, out);
  if (problem.elements() == 0) return;
  const int device = x.device();
  const CurrentDevice guard(device);
  problem.stream = current_stream(device);
  cuda::launch_derivative(problem);
  check_launched();
}

void fold_batch_norm_out(const std::optional<TensorView>& bias, const std::optional<TensorView>& scale,
                         const std::optional<TensorView>& running_mean, const std::optional<TensorView>& running_var,
                         const std::optional<TensorView>& bn_weight, const std::optional<TensorView>& bn_bias,
                         double eps, const TensorView& out) {
  FoldProblem problem = make_fold(bias, scale, running_mean, running_var, bn_weight, bn_bias, eps, out);
  const int device = out.device();
  const CurrentDevice guard(device);
  problem.device = device;
  problem.stream = current_stream(device);
  const char* const refused = fold_cuda(problem);
  check(!refused, "the kernel could not be launched: ", refused ? refused : "");
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_derivative_out", TORCH_BOX(&epigemm::binding::derivative_out));
  m.impl("_fold_batch_norm_out", TORCH_BOX(&epigemm::binding::fold_batch_norm_out));
}
#endif
