// epigemm::_fused_linear_out and _explain_linear: one kernel on the tensors as they lie.
#include "torch/linear.h"

#include <algorithm>

#include "call/kernels.h"
#include "call/operands.h"
#include "gemm/launch.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::binding {
namespace {

// The kernels write to `out` alone.
void* read_only(const TensorView& tensor) { return const_cast<void*>(tensor.data()); }

void check_shapes(const TensorView& x, const TensorView& weight) {
  check(weight.dim() == 2, "weight has shape ", Shape{weight}, ", expected [out_features, in_features]");
  check(x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(1), "x has shape ", Shape{x},
        ", its last dimension must be weight's in_features, ", weight.size(1));
}

void check_output(const TensorView& x, const TensorView& weight, ElementType element, const TensorView& out) {
  bool fits = out.dim() == x.dim() && out.size(out.dim() - 1) == weight.size(0);
  for (int64_t axis = 0; fits && axis + 1 < x.dim(); ++axis) fits = out.size(axis) == x.size(axis);
  check(fits, "out has shape ", Shape{out}, ", expected x's with ", weight.size(0), " in place of the last dimension");
  check(element_of(out, "out") == element, "x, weight and out must have the same dtype");
  check(out.is_beside(x), "x, weight and out must be on the same device");
}

// Where the result goes: a matrix?
bool set_output(const TensorView* out, Problem* problem) {
  const ElementType element = problem->x.element;
  if (!out) {
    problem->out = {nullptr, element, problem->m > 1 ? problem->n : (problem->n + 15) / 16 * 16};
    return true;
  }
  problem->out.element = element;
  return call::as_matrix(view_of(*out, element, out->mutable_data()), problem->m, problem->n, &problem->out);
}

// With the arithmetic of a single kernel.
PreparedCall prepare_kernel(const Name& epilogue, const TensorView& x, const TensorView& weight,
                            const std::optional<TensorView>& bias, const List<TensorView>& operands,
                            const List<double>& scalars, const Name& arithmetic_name, const TensorView* out) {
  PreparedCall call = prepare(epilogue, x, weight, bias, operands, scalars, out);
  const Arithmetic arithmetic = arithmetic_named(arithmetic_name);
  check(!call::is_on_slices(arithmetic), "arithmetic must be ieee or tf32 here, got ", arithmetic_name.text(),
        ": that runs by way of _split_linear_out");
  call.prepared.problem.arithmetic = arithmetic;
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) call.prepared.problem.device = cuda::device(x.device());
#endif
  return call;
}

std::string explain_linear(const Name& epilogue, const TensorView& x, const TensorView& weight,
                           const std::optional<TensorView>& bias, const List<TensorView>& operands,
                           const List<double>& scalars, const Name& arithmetic, const TensorView& out) {
  const PreparedCall call = prepare_kernel(epilogue, x, weight, bias, operands, scalars, arithmetic, &out);
  const Problem& problem = call.prepared.problem;
  std::string why_not = call.not_representable;
  if (!has_gemm_kernels() && why_not.empty() && why_not_fused(problem).empty()) why_not = kNoGemmKernels;
  return plan_json(problem, why_not);
}

#if EPIGEMM_WITH_CUDA

// A forced plan asks whether a kernel can run, not whether it should.
Plan plan_for(const Problem& problem, const std::vector<int64_t>& forced) {
  if (!has_gemm_kernels()) return {};
  if (forced.empty()) return choose_plan(problem);
  if (!why_not_covered(problem).empty()) return {};
  const Plan plan = forced_plan(problem, forced);
  const std::string reason = why_not_planned(problem, plan);
  check(reason.empty(), "plan: ", reason);
  return plan;
}

bool fused_linear_out(const Name& epilogue, const TensorView& x, const TensorView& weight,
                      const std::optional<TensorView>& bias, const List<TensorView>& operands,
                      const List<double>& scalars, const Name& arithmetic, const List<int64_t>& forced,
                      const TensorView& out) {
  PreparedCall call = prepare_kernel(epilogue, x, weight, bias, operands, scalars, arithmetic, &out);
  if (!call.not_representable.empty()) return false;
  const Plan plan = plan_for(call.prepared.problem, forced.values);
  if (plan.is_fused()) launch_fused(call.prepared.problem, plan);
  return plan.is_fused();
}

#endif

}  // namespace

PreparedCall prepare(const Name& epilogue_name, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, const TensorView* out) {
  PreparedCall call;
  call::Prepared& prepared = call.prepared;
  Problem& problem = prepared.problem;
  problem.epilogue = epilogue_named(epilogue_name).id;
  check_shapes(x, weight);
  const ElementType element = element_of(x, "x");
  check(element_of(weight, "weight") == element, "x, weight and out must have the same dtype");
  check(weight.is_beside(x), "x, weight and out must be on the same device");
  if (out) check_output(x, weight, element, *out);
  problem.n = weight.size(0);
  problem.k = weight.size(1);
  problem.m = 1;
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) problem.m *= x.size(axis);
  fill_operands(epilogue_info(problem.epilogue), x, problem.n, bias, operands, scalars, problem.operands);
  prepared.is_x_strided = call::as_strided(view_of(x, element, read_only(x)), problem.m, problem.k, &problem.x);
  call::as_strided(view_of(weight, element, read_only(weight)), problem.n, problem.k, &problem.weight);
  prepared.is_out_matrix = set_output(out, &problem);
  call.not_representable =
      !prepared.is_x_matrix()
          ? "x is not a row-major matrix: its last dimension must be contiguous and the others one stride apart"
      : !prepared.is_weight_matrix() ? "weight is not row-major: its in_features must be contiguous"
      : !prepared.is_out_matrix      ? "out is not a row-major matrix"
                                     : "";
  problem.alignment = std::min({call::alignment_of(problem.x.data), call::alignment_of(problem.weight.data),
                                call::alignment_of(problem.out.data)});
  // Where an epilogue has a bias it is its first operand; a meta tensor has no data.
  problem.has_bias = bias.has_value() || problem.operands[0].data != nullptr;
  problem.are_operands_contiguous = call::are_contiguous(problem);
  prepared.has_cublas = x.is_cuda();
  return call;
}

void launch_fused(Problem& problem, const Plan& plan) {
  check(has_gemm_kernels(), kNoGemmKernels);
  const CurrentDevice guard(problem.device.index);
  problem.stream = current_stream(problem.device.index);
  open::Kernels kernels;
  check(link::find(problem.epilogue, call::kernels_of(problem, plan), &kernels),
        "the epilogue was not linked for this kernel");
  const char* const refused = launch(problem, plan, kernels);
  check(!refused, "the fused kernel could not be launched: ", refused ? refused : "");
}

}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_explain_linear", TORCH_BOX(&epigemm::binding::explain_linear));
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_fused_linear_out", TORCH_BOX(&epigemm::binding::fused_linear_out));
}
#endif
