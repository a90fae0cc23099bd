// epigemm::_linear_out and _explain_call: the decision of csrc/call about a call. A call that needs nothing but its
// tensors is launched.
#include <sstream>

#include "call/kernels.h"
#include "call/operands.h"
#include "link/kernels.h"
#include "torch/linear.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::binding {
namespace {

using call::Tried;
using call::Verdict;

call::Slices slices_of(int64_t bits) {
  check((bits & 3) < 3, "slices: there is no cost ", bits & 3);
  return {static_cast<call::SliceCost>(bits & 3), (bits & 4) != 0};
}

// `fp32`: a row of call::fp32_orders, times two; the last bit is for others. `slices`: three bits for split, three for
// scaled: their cost, and whether memory is short. `gpu`: [index, ...] describes a device that is not there.
void set_circumstances(const TensorView& x, int64_t fp32, int64_t slices, bool is_batch_invariant,
                       const std::vector<int64_t>& gpu, call::Prepared* prepared) {
  prepared->problem.is_batch_invariant = is_batch_invariant;
  check(fp32 >= 0 && fp32 / 2 < call::kFP32Orders, "fp32 must be in 0..", 2 * call::kFP32Orders - 1, ", got ", fp32);
  prepared->fp32_order = static_cast<int>(fp32 / 2);
  prepared->split = slices_of(slices);
  prepared->scaled = slices_of(slices >> 3);
  if (!gpu.empty()) {
    prepared->problem.device = described_device({gpu.begin() + 1, gpu.end()}, gpu[0]);
    prepared->has_cublas = prepared->has_kernels = true;
  }
#if EPIGEMM_WITH_CUDA
  call::Tensor place;
  place.device_kind = x.is_cuda() ? call::DeviceKind::CUDA : call::DeviceKind::CPU;
  place.device = x.device();
  if (gpu.empty() && x.is_cuda() && call::is_ready(place)) prepared->problem.device = cuda::device(x.device());
#else
  (void)x;
#endif
}

enum class Way { Fallback, Tensors, Slices };

// Everything in one number: what Python reads of it is in decisions.py.
int64_t as_number(const call::Decision& decision, call::Gemm gemm) {
  const Way way = !decision.plan.is_fused() ? Way::Fallback : decision.is_on_slices() ? Way::Slices : Way::Tensors;
  const Plan& plan = decision.plan;
  int64_t number = 0;
  int at = 0;
  const auto put = [&](auto value, int bits) {
    number |= static_cast<int64_t>(value) << at;
    at += bits;
  };
  put(way, 2);
  put(gemm, 2);
  put(decision.arithmetic, 2);
  put(decision.is_packed, 1);
  put(decision.is_padded, 1);
  put(plan.family, 8);
  put(plan.tile, 8);
  put(plan.raster, 1);
  put(plan.swizzle, 4);
  put(plan.splits, 4);
  return number;
}

int64_t linear_out(const Name& epilogue, const TensorView& x, const TensorView& weight,
                   const std::optional<TensorView>& bias, const List<TensorView>& operands, const List<double>& scalars,
                   int64_t fp32, int64_t slices, bool is_batch_invariant, const List<int64_t>& gpu, bool is_launched,
                   const std::optional<TensorView>& out) {
  PreparedCall call = prepare(epilogue, x, weight, bias, operands, scalars, out ? &*out : nullptr);
  set_circumstances(x, fp32, slices, is_batch_invariant, gpu.values, &call.prepared);
  const call::Decision decision = call::decide(call.prepared);
  if (is_launched && gpu.values.empty() && decision.plan.is_fused() && !decision.is_on_slices()) {
    check(out.has_value(), "out: there is none to launch into");
    call.prepared.problem.arithmetic = decision.arithmetic;
    launch_fused(call.prepared.problem, decision.plan);
  }
  return as_number(decision, call::choose_gemm(call.prepared));
}

// The open kernels that the call would take and that were not linked yet: their names between commas.
std::string missing_kernels(const Name& epilogue, const TensorView& x, const TensorView& weight,
                            const std::optional<TensorView>& bias, const List<TensorView>& operands,
                            const List<double>& scalars, int64_t fp32, int64_t slices, bool is_batch_invariant,
                            const List<int64_t>& gpu, const std::optional<TensorView>& out) {
  PreparedCall call = prepare(epilogue, x, weight, bias, operands, scalars, out ? &*out : nullptr);
  set_circumstances(x, fp32, slices, is_batch_invariant, gpu.values, &call.prepared);
  Problem& problem = call.prepared.problem;
  const call::Decision decision = call::decide(call.prepared);
  if (problem.is_batch_invariant && !decision.plan.is_fused()) return std::string();  // no fallback follows
  problem.arithmetic = decision.arithmetic;
  return missing_of(problem.epilogue, call::kernels_of(problem, decision.plan));
}

const char* arithmetic_name(Arithmetic arithmetic) {
  constexpr const char* names[] = {"ieee", "tf32", "split", "scaled"};
  return names[static_cast<int>(arithmetic)];
}

std::string microseconds(double value) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << value << " us";
  return text.str();
}

// Why a planned call cannot run; empty where the planner decides.
std::string why_not(const PreparedCall& call, const Tried& tried) {
  switch (tried.verdict) {
    case Verdict::NotRepresentable:
      return call.not_representable;
    case Verdict::NoKernels:
      return kNoGemmKernels;
    case Verdict::MemoryIsShort:
      return "the last call of these sizes found no memory for fp16 slices, and there is not enough yet";
    case Verdict::CopyTakesGain:
      return "out is no matrix with rows of whole 16 bytes, and copying the result takes what was gained";
    case Verdict::TF32IsFaster:
      return "the fused TF32 kernel is expected to be faster (" + microseconds(tried.tf32_microseconds) + " against " +
             microseconds(tried.chosen.microseconds) + " on scaled fp16)";
    default:
      return std::string();
  }
}

void write_tried(std::ostream& json, const PreparedCall& call, Arithmetic arithmetic) {
  const Tried tried = call::try_arithmetic(call.prepared, arithmetic);
  const std::string reason = why_not(call, tried);
  const bool is_ruled_out = tried.verdict == Verdict::NotRepresentable || tried.verdict == Verdict::NoKernels;
  json << std::boolalpha << "{\"arithmetic\": \"" << arithmetic_name(arithmetic)
       << "\", \"runs\": " << (tried.verdict == Verdict::Runs) << ", \"why_not\": \"" << reason
       << "\", \"packed\": " << tried.problem.is_packed << ", \"padded\": " << tried.is_padded
       << ", \"tf32_allowed\": " << tried.problem.is_tf32_allowed
       << ", \"plan\": " << plan_json(tried.problem, is_ruled_out ? reason : "") << "}";
}

// {"tried": each arithmetic in order: {"arithmetic", "runs", "why_not": what the plan does not say itself, "packed",
// "padded", "tf32_allowed", "plan": see plan_json}, "gemm"}.
std::string explain_call(const Name& epilogue, const TensorView& x, const TensorView& weight,
                         const std::optional<TensorView>& bias, const List<TensorView>& operands,
                         const List<double>& scalars, int64_t fp32, int64_t slices, bool is_batch_invariant,
                         const List<int64_t>& gpu, const std::optional<TensorView>& out) {
  PreparedCall call = prepare(epilogue, x, weight, bias, operands, scalars, out ? &*out : nullptr);
  set_circumstances(x, fp32, slices, is_batch_invariant, gpu.values, &call.prepared);
  const call::FP32Order& order = call::order_of(call.prepared);
  const bool has_device = call.prepared.problem.device.capability != 0;
  std::ostringstream json;
  json << "{\"tried\": [";
  bool is_first = true;
  for (int i = 0; i < order.count; ++i) {
    if (call::is_on_slices(order.tried[i]) && !has_device) continue;
    json << (is_first ? "" : ", ");
    write_tried(json, call, order.tried[i]);
    is_first = false;
  }
  json << "], \"gemm\": " << static_cast<int>(call::choose_gemm(call.prepared)) << "}";
  return json.str();
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_linear_out", TORCH_BOX(&epigemm::binding::linear_out));
  m.impl("_missing_kernels", TORCH_BOX(&epigemm::binding::missing_kernels));
  m.impl("_explain_call", TORCH_BOX(&epigemm::binding::explain_call));
}
