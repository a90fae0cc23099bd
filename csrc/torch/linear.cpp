// epigemm::_fused_linear_out and _explain_linear: tensors -> Problem -> Plan -> launch.
#include <algorithm>

#include "gemm/planner/planner.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif
#if EPIGEMM_WITH_SM90
#include "gemm/launch.h"
#endif

namespace epigemm::binding {
namespace {

// A call as the kernels see it, or why they cannot see it.
struct LinearCall {
  Problem problem;
  std::string not_representable;
};

// All leading axes as the rows of one matrix, without a copy. False when no single row stride reaches them all.
bool as_matrix(const TensorView& tensor, int64_t rows, int64_t columns, Matrix* matrix) {
  const int64_t last = tensor.dim() - 1;
  matrix->data = const_cast<void*>(tensor.data());  // the kernels write to `out` alone
  // One row has no stride that anything could walk; any that the hardware accepts will do.
  matrix->row_stride = (columns + 15) / 16 * 16;
  if (columns > 1 && tensor.stride(last) != 1) return false;
  if (rows <= 1) return true;
  int64_t expected = -1;
  for (int64_t axis = last - 1; axis >= 0; --axis) {
    if (tensor.size(axis) == 1) continue;
    if (expected < 0) {
      matrix->row_stride = tensor.stride(axis);
    } else if (tensor.stride(axis) != expected) {
      return false;
    }
    expected = tensor.stride(axis) * tensor.size(axis);
  }
  return true;
}

void check_shapes(const TensorView& x, const TensorView& weight, const TensorView& out) {
  check(weight.dim() == 2, "weight has shape ", Shape{weight}, ", expected [out_features, in_features]");
  check(x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(1), "x has shape ", Shape{x},
        ", its last dimension must be weight's in_features, ", weight.size(1));
  bool fits = out.dim() == x.dim() && out.size(out.dim() - 1) == weight.size(0);
  for (int64_t axis = 0; fits && axis + 1 < x.dim(); ++axis) fits = out.size(axis) == x.size(axis);
  check(fits, "out has shape ", Shape{out}, ", expected x's with ", weight.size(0), " in place of the last dimension");
}

// The largest power of two, at most 256, that divides an address.
int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(address == 0 ? 256 : std::min<uintptr_t>(address & (~address + 1), 256));
}

void set_device(const TensorView& x, Problem* problem) {
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) problem->device = cuda::device(x.device());
#else
  (void)x, (void)problem;
#endif
}

bool are_contiguous(const EpilogueInfo& epilogue, const Problem& problem) {
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const OperandValue& value = problem.operands[i - 1];
    if (epilogue.operands[i].kind == OperandKind::PerColumn && value.data && value.stride != 1 && problem.n > 1) {
      return false;
    }
  }
  return true;
}

LinearCall make_call(const Name& epilogue_name, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, const Name& arithmetic, const TensorView& out) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  check_shapes(x, weight, out);
  LinearCall call;
  Problem& problem = call.problem;
  problem.epilogue = epilogue.id;
  const ElementType element = element_of(x, "x");
  check(element_of(weight, "weight") == element && element_of(out, "out") == element,
        "x, weight and out must have the same dtype");
  problem.x.element = problem.weight.element = problem.out.element = element;
  check(weight.is_beside(x) && out.is_beside(x), "x, weight and out must be on the same device");
  problem.arithmetic = arithmetic_named(arithmetic);
  check(problem.arithmetic == Arithmetic::IEEE || problem.arithmetic == Arithmetic::TF32,
        "arithmetic must be ieee or tf32 here, got ", arithmetic.text(), ": that runs by way of _split_linear_out");
  problem.n = weight.size(0);
  problem.k = weight.size(1);
  problem.m = 1;
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) problem.m *= x.size(axis);
  fill_operands(epilogue, x, problem.n, bias, operands, scalars, problem.operands);
  set_device(x, &problem);
  if (!as_matrix(x, problem.m, problem.k, &problem.x)) {
    call.not_representable =
        "x is not a row-major matrix: its last dimension must be contiguous and the others one stride apart";
  } else if (!as_matrix(weight, problem.n, problem.k, &problem.weight)) {
    call.not_representable = "weight is not row-major: its in_features must be contiguous";
  } else if (!as_matrix(out, problem.m, problem.n, &problem.out)) {
    call.not_representable = "out is not a row-major matrix";
  }
  problem.out.data = out.mutable_data();
  problem.alignment =
      std::min({alignment_of(problem.x.data), alignment_of(problem.weight.data), alignment_of(problem.out.data)});
  // Where an epilogue has a bias it is its first operand.
  problem.has_bias = problem.operands[0].data != nullptr;
  problem.are_operands_contiguous = are_contiguous(epilogue, problem);
  return call;
}

std::string explain_linear(const Name& epilogue, const TensorView& x, const TensorView& weight,
                           const std::optional<TensorView>& bias, const List<TensorView>& operands,
                           const List<double>& scalars, const Name& arithmetic, const TensorView& out) {
  const LinearCall call = make_call(epilogue, x, weight, bias, operands, scalars, arithmetic, out);
  std::string why_not = call.not_representable;
#if !EPIGEMM_WITH_SM90
  if (why_not.empty() && why_not_fused(call.problem).empty()) {
    why_not = "epigemm was built without the Hopper GEMM kernels";
  }
#endif
  return plan_json(call.problem, why_not);
}

#if EPIGEMM_WITH_CUDA

// A forced plan asks whether a kernel can run, not whether it should.
Plan plan_for(const Problem& problem, const std::vector<int64_t>& forced) {
#if EPIGEMM_WITH_SM90
  if (forced.empty()) return choose_plan(problem);
  if (!why_not_covered(problem).empty()) return {};
  const Plan plan = forced_plan(problem, forced);
  const std::string reason = why_not_planned(problem, plan);
  check(reason.empty(), "plan: ", reason);
  return plan;
#else
  (void)problem, (void)forced;
  return {};
#endif
}

bool fused_linear_out(const Name& epilogue, const TensorView& x, const TensorView& weight,
                      const std::optional<TensorView>& bias, const List<TensorView>& operands,
                      const List<double>& scalars, const Name& arithmetic, const List<int64_t>& forced,
                      const TensorView& out) {
  LinearCall call = make_call(epilogue, x, weight, bias, operands, scalars, arithmetic, out);
  if (!call.not_representable.empty()) return false;
  Problem& problem = call.problem;
  const Plan plan = plan_for(problem, forced.values);
  if (!plan.is_fused()) return false;
#if EPIGEMM_WITH_SM90
  const CurrentDevice guard(problem.device.index);
  problem.stream = current_stream(problem.device.index);
  const char* refused = launch(problem, plan);
  check(!refused, "the fused kernel could not be launched: ", refused ? refused : "", " ", cuda::last_error());
#endif
  return true;
}

#endif

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_explain_linear", TORCH_BOX(&epigemm::binding::explain_linear));
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_fused_linear_out", TORCH_BOX(&epigemm::binding::fused_linear_out));
}
#endif
