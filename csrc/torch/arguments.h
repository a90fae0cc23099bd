// Arguments of the operators: passed by torch's stable ABI, checked, and converted to plain structs.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "call/linear.h"
#include "elementwise/fold.h"
#include "epilogue/registry.h"
#include "torch/tensor_view.h"

namespace epigemm::binding {

// A str argument. Not std::string: torch 2.10 to 2.13 leak the string that their conversion allocates at every call.
class Name {
 public:
  // Owns the handle.
  explicit Name(StringHandle handle) : handle_(handle) {
    std::size_t length = 0;
    const char* data = nullptr;
    check_code(torch_string_length(handle, &length));
    check_code(torch_string_c_str(handle, &data));
    text_ = {data, length};
  }

  std::string_view text() const { return text_; }

 private:
  struct Delete {
    void operator()(StringOpaque* handle) const { torch_delete_string(handle); }
  };

  std::unique_ptr<StringOpaque, Delete> handle_;
  std::string_view text_;
};

// The parts of a text between its commas.
std::vector<std::string> split(std::string_view text);

const EpilogueInfo& epilogue_named(const Name& name);
Arithmetic arithmetic_named(const Name& name);
const char* arithmetic_name(Arithmetic arithmetic);

// float16, bfloat16, float32 or float64; anything else is an error that names the argument.
ElementType element_of(const TensorView& tensor, const char* argument);

// The same, or 8 bits: of x and the weight.
ElementType element_of_product(const TensorView& tensor, const char* argument);

// A tensor in the form that csrc/call reads.
call::Tensor view_of(const TensorView& tensor, ElementType element, void* data);

using ReadTensor = std::function<void(const TensorView& tensor, const char* argument, call::Tensor* read)>;

// Assigns an operator's arguments to the epilogue's operands, in its order: `bias` to the one that may be absent,
// `tensors` and `scalars` to the others, in a pair of products except the first matrix. If a tensor could be one of
// several scalars, it is the first one. `storage`: of kMaxOperands. False if their numbers differ.
bool read_operands(const EpilogueInfo& epilogue, const std::optional<TensorView>& bias, const List<TensorView>& tensors,
                   const List<double>& scalars, bool is_pair, const ReadTensor& read, call::Tensor* storage,
                   call::GivenOperands* given);

// A vector of `columns` elements on x's device, or an absent one.
FoldVector vector_of(const std::optional<TensorView>& vector, int64_t columns, const TensorView& x,
                     const char* argument);

// The CUDA stream that torch runs on at present.
void* current_stream(int device);

// Makes a device the current one for a scope. It first asks which device is current, because that is faster than a
// guard, and mostly it is the right one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace epigemm::binding

template <>
struct torch::stable::detail::ToImpl<epigemm::binding::Name> {
  static epigemm::binding::Name call(StableIValue value, uint64_t, bool) {
    return epigemm::binding::Name(torch::stable::detail::to<StringHandle>(value));
  }
};
