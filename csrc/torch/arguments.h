// Arguments of the operators: what torch's stable ABI hands over, checked and turned into plain structs.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "elementwise/problem.h"
#include "epilogue/registry.h"

namespace epigemm::binding {

using torch::stable::Tensor;

// A str argument. Not std::string: torch 2.10 to 2.13 leak the string that their conversion allocates at every call.
struct Name {
  std::string text;
};

// Becomes a RuntimeError in Python. Not STD_TORCH_CHECK, whose messages begin with the path of the source file.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// For calls into torch's C interface. The headers' own macro has changed its name between torch 2.10 and 2.13.
inline void check_code(AOTITorchError code) { check(code == AOTI_TORCH_SUCCESS, "torch's stable interface failed"); }

const EpilogueInfo& epilogue_named(const Name& name);
Arithmetic arithmetic_named(const Name& name);

// float16, bfloat16, float32 or float64; anything else is an error that names the argument.
ElementType element_of(const Tensor& tensor, const char* argument);

// "[2, 3]"
std::string shape_text(const Tensor& tensor);

// Fills one value per operand of the epilogue, in its order: `bias` for the operand of that name, `tensors` and
// `scalars` for the others. `columns` is N, the length of every vector.
void fill_operands(const EpilogueInfo& epilogue, const Tensor& x, int64_t columns, const std::optional<Tensor>& bias,
                   const std::vector<Tensor>& tensors, const std::vector<double>& scalars, OperandValue* values);

// The CUDA stream that torch runs on at present.
void* current_stream(int device);

}  // namespace epigemm::binding

template <>
struct torch::stable::detail::ToImpl<epigemm::binding::Name> {
  static epigemm::binding::Name call(StableIValue value, uint64_t, bool) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    std::size_t length = 0;
    const char* data = nullptr;
    epigemm::binding::check_code(torch_string_length(handle, &length));
    epigemm::binding::check_code(torch_string_c_str(handle, &data));
    epigemm::binding::Name name{std::string(data, length)};
    epigemm::binding::check_code(torch_delete_string(handle));
    return name;
  }
};
