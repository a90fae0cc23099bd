// epigemm::_dry_linear: a linear call that launches nothing. It returns what it would launch, and the reasons on the
// way.
#include <sstream>

#include "call/forced.h"
#include "call/record.h"
#include "gemm/planner/copies.h"
#include "reduce/column_moments.h"
#include "torch/plans.h"

namespace epigemm::binding {
namespace {

using call::Tried;
using call::Verdict;

class DryTorch final : public call::Torch {
 public:
  call::Record noted;
  std::string refused;

  bool result(call::Tensor*) override { return false; }
  void* workspace(int64_t) override { return nullptr; }
  bool gemm(call::Gemm, int, call::Tensor*) override { return false; }
  bool stream(void**) override { return false; }
  void raise(const char* message) override { refused = message; }
  call::Record* record() override { return &noted; }
};

// A call's tensors. `gpu`: [index, ...] describes a device to use in place of the tensors' device; a meta tensor has no
// data.
struct DryCall {
  call::LinearCall linear;
  call::Tensor x, weight, weight2, out, moments, blocks, stored, x_scale, weight_scale, out_scale, group_ends,
      storage[kMaxOperands];
  int64_t moments_sizes[2] = {kMomentsOfColumn, 0}, moments_strides[2] = {0, 1};
  int64_t blocks_sizes[3] = {kMostMergedBehind, 0, 2}, blocks_strides[3] = {0, 2, 1};
  std::vector<int64_t> stored_sizes, stored_strides;
  call::ForcedPlan forced;
  Device described;
  bool is_described = false;

  void read(const TensorView& tensor, const char* argument, call::Tensor* read) const {
    *read = view_of(tensor, element_of_product(tensor, argument), const_cast<void*>(tensor.data()));
    place(tensor, read);
  }

  void place(const TensorView& tensor, call::Tensor* read) const {
    const bool is_on_gpu = is_described || tensor.is_cuda();
    read->device_kind = is_on_gpu ? call::DeviceKind::CUDA : call::DeviceKind::CPU;
    read->device = is_described ? described.index : is_on_gpu ? tensor.device() : 0;
  }

  // As if there were tensors for statistics of the result, as BatchNorm gives them.
  void add_moments() {
    const ElementType element = x.element == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32;
    const int64_t columns = weight.dim == 2 ? weight.sizes[0] : 0;
    moments_sizes[1] = moments_strides[0] = blocks_sizes[1] = columns;
    blocks_strides[0] = 2 * columns;
    moments = {nullptr, element, x.device_kind, x.device, 2, moments_sizes, moments_strides};
    blocks = {nullptr, element, x.device_kind, x.device, 3, blocks_sizes, blocks_strides};
    linear.column_moments = &moments;
    linear.column_blocks = &blocks;
  }

  // As if there were a tensor for the epilogue's second values, like a new result.
  void add_stored() {
    if (x.dim < 1 || weight.dim != 2) return;
    stored_sizes.assign(x.sizes, x.sizes + x.dim);
    stored_sizes.back() = weight.sizes[0];
    stored_strides.assign(x.dim, 1);
    for (int axis = x.dim - 2; axis >= 0; --axis) {
      stored_strides[axis] = stored_strides[axis + 1] * stored_sizes[axis + 1];
    }
    stored = {nullptr, linear.result_element(), x.device_kind,        x.device,
              x.dim,   stored_sizes.data(),     stored_strides.data()};
    linear.stored = &stored;
  }
};

std::string microseconds(double value) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << value << " us";
  return text.str();
}

// Why a planned call cannot run; empty if the planner decides.
std::string why_not(const call::Prepared& prepared, const Tried& tried) {
  switch (tried.verdict) {
    case Verdict::NotRepresentable:
      return call::why_not_readable(prepared);
    case Verdict::NoKernels:
      return call::kNoGemmKernels;
    case Verdict::MemoryIsShort:
      return "the last call of these sizes found no memory for fp16 slices, and there is not enough yet";
    case Verdict::CopyTakesGain:
      return "out is no matrix with rows of whole 16 bytes, and copying the result takes what was gained";
    case Verdict::OtherIsFaster: {
      const bool is_split = tried.problem.arithmetic == Arithmetic::Split;
      return std::string("the fused ") + (is_split ? "kernel of fp32 multiply-adds" : "TF32 kernel") +
             " is expected to be faster (" + microseconds(tried.other_microseconds) + " against " +
             microseconds(tried.chosen.microseconds) + (is_split ? " on fp16 slices)" : " on scaled fp16)");
    }
    default:
      return std::string();
  }
}

template <class Item, class Write>
void write_list(std::ostream& json, const char* name, const std::vector<Item>& items, Write write) {
  json << ", \"" << name << "\": [";
  for (std::size_t i = 0; i < items.size(); ++i) {
    json << (i ? ", " : "");
    write(items[i]);
  }
  json << "]";
}

void write_tried(std::ostream& json, const call::Prepared& prepared, const Tried& tried) {
  const std::string reason = why_not(prepared, tried);
  const bool is_ruled_out = tried.verdict == Verdict::NotRepresentable || tried.verdict == Verdict::NoKernels;
  json << "{\"arithmetic\": \"" << arithmetic_name(tried.problem.arithmetic)
       << "\", \"runs\": " << (tried.verdict == Verdict::Runs) << ", \"why_not\": \"" << reason
       << "\", \"packed\": " << tried.problem.is_packed << ", \"tf32_allowed\": " << tried.problem.is_tf32_allowed
       << ", \"tunable\": " << is_tunable(tried.problem);
  write_list(json, "copies", describe_copies(tried.problem),
             [&](const std::string& text) { json << "\"" << text << "\""; });
  json << ", \"plan\": " << plan_json(tried.problem, is_ruled_out ? reason : "") << "}";
}

std::string as_json(call::Answer answer, const DryTorch& torch) {
  const call::Record& record = torch.noted;
  const call::Decision& decision = record.decision;
  const Plan& plan = decision.plan;
  std::ostringstream json;
  json << std::boolalpha << "{\"answer\": " << static_cast<int>(answer) << ", \"refused\": \"" << torch.refused
       << "\", \"fused\": " << plan.is_fused() << ", \"on_slices\": " << decision.is_on_slices()
       << ", \"arithmetic\": \"" << arithmetic_name(decision.arithmetic) << "\", \"packed\": " << decision.is_packed
       << ", \"gemm\": " << static_cast<int>(record.gemm) << ", \"plan\": [" << static_cast<int>(plan.family) << ", "
       << plan.tile << ", " << static_cast<int>(plan.raster) << ", " << plan.swizzle << ", " << plan.splits << "]";
  write_list(json, "reasons", record.reasons, [&](call::Answer reason) { json << static_cast<int>(reason); });
  write_list(json, "launches", record.launches, [&](const char* launch) { json << "\"" << launch << "\""; });
  write_list(json, "missing", record.missing, [&](const std::string& name) { json << "\"" << name << "\""; });
  write_list(json, "tried", record.tried, [&](const Tried& tried) { write_tried(json, record.prepared, tried); });
  json << "}";
  return json.str();
}

// `fp32`: a row of call::fp32_orders. `gpu`: see DryCall. `circumstances`, `slices`, `plan`: see
// call/forced.h.
std::string dry_linear(const Name& epilogue_name, const TensorView& x, const TensorView& weight,
                       const std::optional<TensorView>& bias, const List<TensorView>& operands,
                       const List<double>& scalars, const std::optional<TensorView>& out, int64_t fp32,
                       int64_t circumstances, int64_t slices, bool is_strict, bool is_batch_invariant,
                       const List<int64_t>& gpu, const List<int64_t>& plan, bool wants_tried,
                       const std::optional<TensorView>& weight2, bool gives_moments,
                       const std::optional<TensorView>& x_scale, const std::optional<TensorView>& weight_scale,
                       int64_t result, const std::optional<TensorView>& out_scale,
                       const std::optional<TensorView>& group_ends) {
  check(fp32 >= 0 && fp32 < call::kFP32Orders, "fp32 must be in 0..", call::kFP32Orders - 1, ", got ", fp32);
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  DryCall dry;
  call::LinearCall& linear = dry.linear;
  if (!gpu.values.empty()) {
    dry.described = described_device({gpu.values.begin() + 1, gpu.values.end()}, gpu.values[0]);
    dry.is_described = true;
    linear.described = &dry.described;
  }
  linear.epilogue = epilogue.id;
  linear.x = &dry.x;
  linear.weight = &dry.weight;
  linear.fp32_order = static_cast<int>(fp32);
  linear.needs_other_setting = circumstances & call::kOtherSetting;
  linear.is_out_padded = circumstances & call::kOutPadded;
  linear.is_strict = is_strict;
  linear.is_batch_invariant = is_batch_invariant;
  linear.is_out_apart = true;  // not asked here
  call::read_slices(slices, &linear);
  dry.read(x, "x", &dry.x);
  dry.read(weight, "weight", &dry.weight);
  if (weight2) {
    dry.read(*weight2, "weight2", &dry.weight2);
    linear.weight2 = &dry.weight2;
  }
  if (x_scale && weight_scale) {
    dry.read(*x_scale, "x_scale", &dry.x_scale);
    dry.read(*weight_scale, "weight_scale", &dry.weight_scale);
    linear.eight_bits = {&dry.x_scale, &dry.weight_scale, static_cast<ElementType>(result)};
    call::GivenOperand& scale = linear.eight_bits.out_scale;
    if (out_scale) {
      dry.read(*out_scale, "out_scale", &dry.out_scale);
      scale.tensor = &dry.out_scale;
    } else if (is_8_bits(linear.eight_bits.result)) {
      scale = {nullptr, /*number=*/1, /*has_number=*/true};
    }
  }
  if (group_ends) {
    check(group_ends->dtype() == aoti_torch_dtype_int32(), "group_ends must be int32");
    dry.group_ends = view_of(*group_ends, ElementType::Int32, const_cast<void*>(group_ends->data()));
    dry.place(*group_ends, &dry.group_ends);
    linear.group_ends = &dry.group_ends;
  }
  if (out) {
    dry.read(*out, "out", &dry.out);
    linear.out = &dry.out;
  }
  if (gives_moments) dry.add_moments();
  if (epilogue.has_store) dry.add_stored();
  DryTorch torch;
  torch.noted.wants_tried = wants_tried;
  if (!plan.values.empty()) {
    const std::string wrong =
        call::read_forced(plan.values.data(), plan.values.size(), linear.weight2 != nullptr, &dry.forced);
    check(wrong.empty(), "plan: ", wrong);
    linear.forced = &dry.forced;
  }
  const bool is_read = read_operands(
      epilogue, bias, operands, scalars, dry.linear.weight2 != nullptr,
      [&](const TensorView& tensor, const char* argument, call::Tensor* read) { dry.read(tensor, argument, read); },
      dry.storage, &dry.linear.operands);
  return as_json(is_read ? call::linear(linear, torch) : call::Answer::DoesNotFit, torch);
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_dry_linear", TORCH_BOX(&epigemm::binding::dry_linear));
}
