// epigemm::_into: what compiled graphs hold. A whole call, from tensors to launches, without Python. PyTorch takes as
// long for each two arguments as the call takes here, so options are one number, and operands beyond two are a list. A
// call that this operator cannot finish goes to epigemm::_cold, which has the same arguments and is written in Python.
#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>

#include "call/decide.h"
#include "call/elementwise.h"
#include "epilogue/builtin.h"
#include "torch/stable_torch.h"

namespace epigemm::binding {
namespace {

using Optional = std::optional<TensorView>;

// The epilogue's operands in its order, or with `folds` the vectors that are folded into them; then none.
using Places = std::array<const Optional*, kMaxOperands>;

// The argument `options`: a row of call::fp32_orders, and a sum of these. Python has the same (operators/graphs.py).
constexpr int64_t kOrders = 15, kFolds = 16, kIsStrict = 64;  // 32: a kept pack may be used; Python alone asks

// The operator's arguments.
struct Given {
  int64_t epilogue, digest;
  const TensorView& x;
  const Optional& weight;  // of a linear call
  Places operands;
  double number;  // the scalar that is not among the operands; with `folds` the eps
  int64_t options;
  const TensorView& out;
  const Optional& stored;  // of an epilogue that has second values: receives them

  bool folds() const { return options & kFolds; }
  int fp32() const { return static_cast<int>(options & kOrders); }
};

// What a call points to.
struct Storage {
  call::Tensor x, weight, out, stored, operands[kMaxOperands];
  call::FoldVectors fold;
};

bool read_optional(const Optional& given, call::Tensor* storage, const call::Tensor** pointer) {
  if (!given) return true;
  *pointer = storage;
  return read(*given, storage);
}

bool read_fold(const Given& given, Storage* storage, call::GivenOperands* operands) {
  operands->fold = &storage->fold;
  storage->fold.eps = given.number;
  bool is_read = true;
  for (int i = 0; i < call::kFoldVectors; ++i)
    is_read = is_read && read_optional(*given.operands[i], &storage->operands[i], &storage->fold.vectors[i]);
  return is_read;
}

bool read_operands(const Given& given, const EpilogueInfo& info, Storage* storage, call::GivenOperands* operands) {
  if (given.folds()) return info.id == EpilogueId::scale_batch_norm && read_fold(given, storage, operands);
  operands->count = info.operand_count - 1;
  for (int i = 0; i < kMaxOperands; ++i) {
    const Optional& place = *given.operands[i];
    if (i >= operands->count && place) return false;
    if (i >= operands->count) continue;
    call::GivenOperand& operand = operands->values[i];
    operand.number = given.number;
    operand.has_number = !place && info.operands[i + 1].kind == OperandKind::Scalar;
    if (!place && !operand.has_number && i + 1 != info.bias) return false;
    if (!read_optional(place, &storage->operands[i], &operand.tensor)) return false;
  }
  return true;
}

// Arguments of an operator, as PyTorch's dispatcher takes them.
StableIValue passed(const TensorView& tensor) {
  AtenTensorHandle handle = nullptr;
  check_code(aoti_torch_new_tensor_handle(tensor.handle(), &handle));
  return torch::stable::detail::from(handle);
}

StableIValue passed(const Optional& tensor) {
  if (!tensor) return torch::stable::detail::from(std::nullopt);
  return torch::stable::detail::from(new StableIValue(passed(*tensor)));
}

StableIValue passed(const List<Optional>& tensors) {
  if (tensors.values.empty()) return torch::stable::detail::from(std::nullopt);
  StableListHandle list = nullptr;
  check_code(torch_new_list_reserve_size(tensors.values.size(), &list));
  for (const Optional& each : tensors.values) check_code(torch_list_push_back(list, passed(each)));
  return torch::stable::detail::from(new StableIValue(torch::stable::detail::from(list)));
}

template <class Number>
StableIValue passed(Number number) {
  return torch::stable::detail::from(number);
}

// Calls epigemm::_cold. It returns an error's text as the bytes of a tensor, because the stable
// ABI passes neither exceptions nor strings.
template <class... Arguments>
void call_cold(const Arguments&... arguments) {
  StableIValue stack[] = {passed(arguments)...};
  check(torch_call_dispatcher("epigemm::_cold", "", stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS,
        "epigemm::_cold could not be called; import epigemm in this process");
  const auto error = torch::stable::detail::to<std::optional<AtenTensorHandle>>(stack[0]);
  if (!error) return;
  const TensorView text(*error);
  fail(std::string_view(static_cast<const char*>(text.data()), static_cast<std::size_t>(text.numel())));
}

// Whether the call is complete. If not, epigemm::_cold makes it.
bool is_done(call::Answer answer, const StableTorch& torch) {
  if (answer == call::Answer::Raised && !torch.message().empty()) fail(torch.message());
  return answer == call::Answer::Done;
}

// FNV-1a of a name, without a sign. Python computes the same (operators/graphs.py).
int64_t digest_of(std::string_view name) {
  uint64_t digest = 0xcbf29ce484222325u;
  for (const unsigned char letter : name) digest = (digest ^ letter) * 0x100000001b3u;
  return static_cast<int64_t>(digest >> 1);
}

// Whether Python has packs of weights, or has noted a shortage of memory, that calls on fp16 slices have to consider.
std::atomic<bool> has_state_in_python{false};

void look_in_python() { has_state_in_python.store(true, std::memory_order_relaxed); }

bool may_take_slices(const Given& given, const call::Tensor& x) {
  if (x.element != ElementType::Float32 || !given.x.is_cuda()) return false;
  const call::FP32Order& order = call::fp32_orders[given.fp32()];
  return std::any_of(order.tried, order.tried + order.count,
                     [](Arithmetic each) { return each == Arithmetic::Split || each == Arithmetic::Scaled; });
}

bool make_linear(const Given& given, const EpilogueInfo& info) {
  Storage storage;
  call::LinearCall linear;
  linear.epilogue = info.id;
  linear.x = &storage.x;
  linear.weight = &storage.weight;
  linear.out = &storage.out;
  linear.fp32_order = given.fp32();
  linear.is_strict = given.options & kIsStrict;
  if (given.fp32() >= call::kFP32Orders) return false;
  if (!read(given.x, &storage.x) || !read(*given.weight, &storage.weight) || !read(given.out, &storage.out))
    return false;
  if (!read_optional(given.stored, &storage.stored, &linear.stored)) return false;
  if (storage.weight.dim != 2 || !read_operands(given, info, &storage, &linear.operands)) return false;
  if (has_state_in_python.load(std::memory_order_relaxed) && may_take_slices(given, storage.x)) return false;
  const int place = given.folds() ? 1 : info.bias;  // the first vector of a fold is the bias
  const TensorView* const bias = place && *given.operands[place - 1] ? &**given.operands[place - 1] : nullptr;
  StableTorch torch(given.x, &*given.weight, bias, given.out);
  return is_done(call::linear(linear, torch), torch);
}

bool make_elementwise(const Given& given, const EpilogueInfo& info) {
  Storage storage;
  call::ElementwiseCall elementwise;
  elementwise.epilogue = info.id;
  elementwise.x = &storage.x;
  elementwise.out = &storage.out;
  if (!read(given.x, &storage.x) || !read(given.out, &storage.out)) return false;
  if (!read_operands(given, info, &storage, &elementwise.operands)) return false;
  StableTorch torch(given.x, nullptr, nullptr, given.out);
  return is_done(call::elementwise(elementwise, torch), torch);
}

// The graph may come from another process, in which the number belonged to another linked epilogue.
bool make(const Given& given) {
  const EpilogueInfo* const info = epilogue_at(given.epilogue);
  if (!info || digest_of(info->name) != given.digest) return false;
  return given.weight ? make_linear(given, *info) : make_elementwise(given, *info);
}

void into(int64_t epilogue, int64_t digest, const TensorView& x, const Optional& weight, const Optional& operand0,
          const Optional& operand1, const List<Optional>& others, double number, int64_t options, const TensorView& out,
          const Optional& stored) {
  static const Optional absent;
  check(others.values.size() + 2 <= kMaxOperands, "others: got ", others.values.size(), " operands; accepted are ",
        kMaxOperands - 2);
  Places operands;
  operands.fill(&absent);
  operands[0] = &operand0, operands[1] = &operand1;
  for (std::size_t i = 0; i < others.values.size(); ++i) operands[i + 2] = &others.values[i];
  if (make({epilogue, digest, x, weight, operands, number, options, out, stored})) return;
  call_cold(epilogue, digest, x, weight, operand0, operand1, others, number, options, out, stored);
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_into", TORCH_BOX(&epigemm::binding::into));
  m.impl("_look_in_python", TORCH_BOX(&epigemm::binding::look_in_python));
}
