// epigemm::_fused_linear_out, _explain_linear and _plan_linear: tensors -> Problem -> Plan -> launch.
#include <cstring>

#include "gemm/dispatch.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "elementwise/launch.h"
#endif
#if EPIGEMM_WITH_SM90
#include "gemm/sm90/kernels.h"
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

void set_device(const TensorView& x, Problem* problem) {
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) {
    problem->device = x.device();
    problem->capability = cuda::device(problem->device).capability;
    problem->multiprocessors = cuda::device(problem->device).multiprocessors;
  }
#else
  (void)x, (void)problem;
#endif
}

LinearCall make_call(const Name& epilogue_name, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, const Name& arithmetic, const TensorView& out) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  check_shapes(x, weight, out);
  LinearCall call;
  Problem& problem = call.problem;
  problem.epilogue = epilogue.id;
  problem.element = element_of(x, "x");
  check(element_of(weight, "weight") == problem.element && element_of(out, "out") == problem.element,
        "x, weight and out must have the same dtype");
  check(weight.is_beside(x) && out.is_beside(x), "x, weight and out must be on the same device");
  problem.arithmetic = arithmetic_named(arithmetic);
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
  return call;
}

// Why no fused kernel runs a call; empty where one does.
std::string why_not(const LinearCall& call) {
  std::string reason = call.not_representable;
  if (reason.empty()) reason = why_not_fused(traits_of(call.problem));
#if !EPIGEMM_WITH_SM90
  if (reason.empty()) reason = "epigemm was built without the Hopper GEMM kernels";
#endif
  return reason;
}

TileText describe(int index, ElementType element) {
  const int k = sm90::kTileKBytes / element_bytes(element);
  if (is_narrow(index)) {
    const narrow::Tile& tile = narrow::kTiles[index - sm90::kTileCount];
    return {tile.m, tile.n, k, 1, 1, "narrow", /*transposed=*/false};
  }
  const sm90::Tile& tile = sm90::kTiles[index];
  return {tile.m, tile.n, k, tile.cluster_m, tile.cluster_n, schedule_name(tile.schedule), /*transposed=*/false};
}

// `representable`: the tensors are matrices, so that the traits tell all about them.
std::string plan_json(const ProblemTraits& traits, const std::string& why_not, bool representable) {
  Answer answer{why_not, {}, std::nullopt, second_path_microseconds(traits)};
  if (representable && why_not_covered(traits).empty()) {
    answer.candidates = rank_candidates(traits);
    answer.measured = measured_choice(traits);
  }
  return binding::plan_json(answer, [&](int index) { return describe(index, traits.element); });
}

std::string explain_linear(const Name& epilogue, const TensorView& x, const TensorView& weight,
                           const std::optional<TensorView>& bias, const List<TensorView>& operands,
                           const List<double>& scalars, const Name& arithmetic, const TensorView& out) {
  const LinearCall call = make_call(epilogue, x, weight, bias, operands, scalars, arithmetic, out);
  return plan_json(traits_of(call.problem), why_not(call), call.not_representable.empty());
}

std::string plan_linear(const Name& epilogue, int64_t m, int64_t n, int64_t k, int64_t x_row_stride,
                        int64_t weight_row_stride, int64_t out_row_stride, int64_t alignment, const Name& dtype,
                        const Name& arithmetic, int64_t capability, int64_t multiprocessors, bool has_bias,
                        int64_t device) {
  check(m >= 0 && n >= 0 && k >= 0, "m, n and k must not be negative, got ", m, ", ", n, ", ", k);
  check(multiprocessors > 0, "multiprocessors must be positive, got ", multiprocessors);
  ProblemTraits traits;
  traits.epilogue = epilogue_named(epilogue).id;
  traits.element = element_named(dtype);
  traits.arithmetic = arithmetic_named(arithmetic);
  traits.m = m;
  traits.n = n;
  traits.k = k;
  traits.x_row_stride = x_row_stride;
  traits.weight_row_stride = weight_row_stride;
  traits.out_row_stride = out_row_stride;
  traits.alignment = static_cast<int>(alignment);
  traits.capability = static_cast<int>(capability);
  traits.multiprocessors = static_cast<int>(multiprocessors);
  traits.has_bias = has_bias;
  traits.device = static_cast<int>(device);
  return plan_json(traits, why_not_fused(traits), /*representable=*/true);
}

// What a batch-invariant call on aligned, row-major tensors runs on.
std::string plan_linear_invariant(const Name& epilogue, int64_t m, int64_t n, int64_t k, const Name& dtype,
                                  const Name& arithmetic, int64_t capability, int64_t multiprocessors) {
  check(m >= 0 && n >= 0 && k >= 0, "m, n and k must not be negative, got ", m, ", ", n, ", ", k);
  check(multiprocessors > 0, "multiprocessors must be positive, got ", multiprocessors);
  ProblemTraits traits;
  traits.epilogue = epilogue_named(epilogue).id;
  traits.element = element_named(dtype);
  traits.arithmetic = arithmetic_named(arithmetic);
  traits.m = m;
  traits.n = n;
  traits.k = traits.x_row_stride = traits.weight_row_stride = k;
  traits.out_row_stride = n;
  traits.alignment = 16;
  traits.capability = static_cast<int>(capability);
  traits.multiprocessors = static_cast<int>(multiprocessors);
  const Answer answer{why_not_covered(traits), {invariant_candidate(traits)}, std::nullopt, 0};
  return binding::plan_json(answer, [&](int index) { return describe(index, traits.element); });
}

#if EPIGEMM_WITH_CUDA

// What becomes of a call. A forced plan asks whether a kernel can run, not whether it should.
Decision decide(const ProblemTraits& traits, const std::vector<int64_t>& forced) {
#if EPIGEMM_WITH_SM90
  if (forced.empty()) return epigemm::decide(traits);
  if (!why_not_covered(traits).empty()) return {};
  const Plan plan = forced_plan(forced, kTileCount);
  const std::string reason = why_not_planned(traits, plan);
  check(reason.empty(), "plan: ", reason);
  return {true, plan};
#else
  (void)traits, (void)forced;
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
  const Decision decision = decide(traits_of(problem), forced.values);
  if (!decision.fused) return false;
#if EPIGEMM_WITH_SM90
  const CurrentDevice guard(problem.device);
  problem.stream = current_stream(problem.device);
  const Plan& plan = decision.plan;
  const char* refused = sm90::find_launch(problem.epilogue, problem.element, plan.tile)(problem, plan);
  check(!refused, "the fused kernel could not be launched: ", refused ? refused : "", " ", cuda::last_error());
#endif
  return true;
}

#endif

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_plan_linear", TORCH_BOX(&epigemm::binding::plan_linear));
  m.impl("_plan_linear_invariant", TORCH_BOX(&epigemm::binding::plan_linear_invariant));
  m.impl("_explain_linear", TORCH_BOX(&epigemm::binding::explain_linear));
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_fused_linear_out", TORCH_BOX(&epigemm::binding::fused_linear_out));
}
#endif
