// epigemm::_linear_into, _linear_folded_into, _linear_flat_into, _elementwise_into and _elementwise_folded_into: what
// compiled graphs hold. A whole call, from tensors to launches, without Python. Arguments are flat, because lists and
// strings cost the host more than the call. A call that this operator cannot finish goes to the operator of the same
// name and arguments with `_cold` for `_into`, which is written in Python.
#include <array>
#include <atomic>
#include <string_view>

#include "call/decide.h"
#include "epilogue/builtin.h"
#include "call/elementwise.h"
#include "torch/stable_torch.h"

namespace epigemm::binding {
namespace {

using Optional = std::optional<TensorView>;

bool read_optional(const Optional& given, call::Tensor* storage, const call::Tensor** pointer) {
  if (!given) return true;
  *pointer = storage;
  return read(*given, storage);
}

// The arguments that linear and elementwise calls share.
struct Operands {
  call::Tensor storage[kMaxBuiltinOperands];

  template <class Call>
  bool read(int64_t epilogue, const Optional& bias, const Optional& vector0, const Optional& vector1,
            const Optional& scalar, double number, Call* call) {
    if (epilogue < 0 || epilogue >= kEpilogueCount) return false;
    call->epilogue = static_cast<EpilogueId>(epilogue);
    const EpilogueInfo& info = epilogue_info(call->epilogue);
    const Optional* const vectors[] = {&vector0, &vector1};
    int next_vector = 0;
    bool is_read = info.bias > 0 || !bias;
    call->operands.count = info.operand_count - 1;
    for (int i = 0; i < call->operands.count && is_read; ++i) {
      call::GivenOperand& operand = call->operands.values[i];
      const bool is_scalar = info.operands[i + 1].kind == OperandKind::Scalar;
      const Optional& given = is_scalar ? scalar : i + 1 == info.bias ? bias : *vectors[next_vector++];
      operand.number = number;
      operand.has_number = is_scalar && !given;
      is_read = read_optional(given, &storage[i], &operand.tensor);
    }
    return is_read;
  }
};

// The arguments of a BatchNorm fold.
struct Fold {
  call::Tensor storage[6];
  call::FoldVectors vectors;

  bool read(const Optional* const (&given)[6], double eps) {
    vectors.eps = eps;
    bool is_read = true;
    for (int i = 0; i < 6; ++i) is_read = is_read && read_optional(*given[i], &storage[i], &vectors.vectors[i]);
    return is_read;
  }
};

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

template <class Number>
StableIValue passed(Number number) {
  return torch::stable::detail::from(number);
}

// Calls an operator that is written in Python. It returns an error's text as the bytes of a tensor, because the stable
// ABI passes neither exceptions nor strings.
template <class... Arguments>
void call_cold(const char* name, const Arguments&... arguments) {
  StableIValue stack[] = {passed(arguments)...};
  check(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS, name,
        " could not be called; import epigemm in this process");
  const auto error = torch::stable::detail::to<std::optional<AtenTensorHandle>>(stack[0]);
  if (!error) return;
  const TensorView text(*error);
  fail(std::string_view(static_cast<const char*>(text.data()), static_cast<std::size_t>(text.numel())));
}

// Whether the call is complete. If not, the operator in Python makes it.
bool is_done(call::Answer answer, const StableTorch& torch) {
  if (answer == call::Answer::Raised && !torch.message().empty()) fail(torch.message());
  return answer == call::Answer::Done;
}

struct LinearTensors {
  call::Tensor x, weight, out;

  bool read(const TensorView& given_x, const TensorView& given_weight, const TensorView& given_out, int64_t fp32,
            bool is_strict, call::LinearCall* linear) {
    linear->x = &x;
    linear->weight = &weight;
    linear->out = &out;
    linear->fp32_order = static_cast<int>(fp32);
    linear->is_strict = is_strict;
    return fp32 >= 0 && fp32 < call::kFP32Orders && binding::read(given_x, &x) &&
           binding::read(given_weight, &weight) && binding::read(given_out, &out) && weight.dim == 2;
  }
};

void linear_into(int64_t epilogue, const TensorView& x, const TensorView& weight, const Optional& bias,
                 const Optional& vector0, const Optional& vector1, const Optional& scalar, double number, int64_t fp32,
                 bool is_strict, const TensorView& out) {
  call::LinearCall linear;
  LinearTensors tensors;
  Operands operands;
  if (tensors.read(x, weight, out, fp32, is_strict, &linear) &&
      operands.read(epilogue, bias, vector0, vector1, scalar, number, &linear)) {
    StableTorch torch(x, &weight, bias ? &*bias : nullptr, out);
    if (is_done(call::linear(linear, torch), torch)) return;
  }
  call_cold("epigemm::_linear_cold", epilogue, x, weight, bias, vector0, vector1, scalar, number, fp32, is_strict, out);
}

void linear_folded_into(const TensorView& x, const TensorView& weight, const Optional& bias, const Optional& scale,
                        const Optional& mean, const Optional& variance, const Optional& gamma, const Optional& beta,
                        double eps, int64_t fp32, bool is_strict, const TensorView& out) {
  call::LinearCall linear;
  LinearTensors tensors;
  Fold fold;
  linear.epilogue = EpilogueId::scale_batch_norm;
  linear.operands.fold = &fold.vectors;
  if (tensors.read(x, weight, out, fp32, is_strict, &linear) &&
      fold.read({&bias, &scale, &mean, &variance, &gamma, &beta}, eps)) {
    StableTorch torch(x, &weight, bias ? &*bias : nullptr, out);
    if (is_done(call::linear(linear, torch), torch)) return;
  }
  call_cold("epigemm::_linear_folded_cold", x, weight, bias, scale, mean, variance, gamma, beta, eps, fp32, is_strict,
            out);
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

using FlatOperands = std::array<const Optional*, kMaxOperands>;

// Makes a call with any epilogue, its operands in order. The graph may come from another process, in which the number
// belonged to another linked epilogue.
bool make_flat(int64_t epilogue, int64_t digest, const TensorView& x, const TensorView& weight,
               const FlatOperands& given, int64_t fp32, const TensorView& out) {
  const EpilogueInfo* const info = epilogue_at(epilogue);
  call::LinearCall linear;
  LinearTensors tensors;
  if (!info || digest_of(info->name) != digest || !tensors.read(x, weight, out, fp32, false, &linear)) return false;
  const bool may_take_slices = tensors.x.element == ElementType::Float32 && x.is_cuda();
  if (may_take_slices && has_state_in_python.load(std::memory_order_relaxed)) return false;
  call::Tensor storage[kMaxOperands];
  linear.epilogue = info->id;
  linear.operands.count = info->operand_count - 1;
  for (int i = 0; i < kMaxOperands; ++i) {
    const bool may_be_absent = i + 1 == info->bias;
    if (given[i]->has_value() != (i < linear.operands.count) && !(may_be_absent && !given[i]->has_value()))
      return false;
    if (!read_optional(*given[i], &storage[i], &linear.operands.values[i].tensor)) return false;
  }
  const int place = info->bias;
  const TensorView* const bias = place && given[place - 1]->has_value() ? &**given[place - 1] : nullptr;
  StableTorch torch(x, &weight, bias, out);
  return is_done(call::linear(linear, torch), torch);
}

void linear_flat_into(int64_t epilogue, int64_t digest, const TensorView& x, const TensorView& weight,
                      const Optional& operand0, const Optional& operand1, const Optional& operand2,
                      const Optional& operand3, const Optional& operand4, const Optional& operand5,
                      const Optional& operand6, const Optional& operand7, const Optional& operand8,
                      const Optional& operand9, const Optional& operand10, const Optional& operand11, int64_t fp32,
                      const TensorView& out) {
  const FlatOperands given = {&operand0, &operand1, &operand2, &operand3, &operand4,  &operand5,
                              &operand6, &operand7, &operand8, &operand9, &operand10, &operand11};
  if (make_flat(epilogue, digest, x, weight, given, fp32, out)) return;
  call_cold("epigemm::_linear_flat_cold", epilogue, digest, x, weight, operand0, operand1, operand2, operand3, operand4,
            operand5, operand6, operand7, operand8, operand9, operand10, operand11, fp32, out);
}

void elementwise_into(int64_t epilogue, const TensorView& x, const Optional& bias, const Optional& vector0,
                      const Optional& vector1, const Optional& scalar, double number, const TensorView& out) {
  call::ElementwiseCall elementwise;
  call::Tensor x_read, out_read;
  Operands operands;
  elementwise.x = &x_read;
  elementwise.out = &out_read;
  if (read(x, &x_read) && read(out, &out_read) &&
      operands.read(epilogue, bias, vector0, vector1, scalar, number, &elementwise)) {
    StableTorch torch(x, nullptr, nullptr, out);
    if (is_done(call::elementwise(elementwise, torch), torch)) return;
  }
  call_cold("epigemm::_elementwise_cold", epilogue, x, bias, vector0, vector1, scalar, number, out);
}

void elementwise_folded_into(const TensorView& x, const Optional& bias, const Optional& scale, const Optional& mean,
                             const Optional& variance, const Optional& gamma, const Optional& beta, double eps,
                             const TensorView& out) {
  call::ElementwiseCall elementwise;
  call::Tensor x_read, out_read;
  Fold fold;
  elementwise.epilogue = EpilogueId::scale_batch_norm;
  elementwise.operands.fold = &fold.vectors;
  elementwise.x = &x_read;
  elementwise.out = &out_read;
  if (read(x, &x_read) && read(out, &out_read) && fold.read({&bias, &scale, &mean, &variance, &gamma, &beta}, eps)) {
    StableTorch torch(x, nullptr, nullptr, out);
    if (is_done(call::elementwise(elementwise, torch), torch)) return;
  }
  call_cold("epigemm::_elementwise_folded_cold", x, bias, scale, mean, variance, gamma, beta, eps, out);
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_linear_into", TORCH_BOX(&epigemm::binding::linear_into));
  m.impl("_linear_folded_into", TORCH_BOX(&epigemm::binding::linear_folded_into));
  m.impl("_linear_flat_into", TORCH_BOX(&epigemm::binding::linear_flat_into));
  m.impl("_look_in_python", TORCH_BOX(&epigemm::binding::look_in_python));
  m.impl("_elementwise_into", TORCH_BOX(&epigemm::binding::elementwise_into));
  m.impl("_elementwise_folded_into", TORCH_BOX(&epigemm::binding::elementwise_folded_into));
}
