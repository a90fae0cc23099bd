#include "torch/arguments.h"
#include "epilogue/builtin.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

namespace epigemm::binding {
std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

call::Tensor view_of(const TensorView& tensor, ElementType element, void* data) {
  call::Tensor view;
  view.data = data;
  view.element = element;
  view.dim = static_cast<int>(tensor.dim());
  view.sizes = tensor.sizes();
  view.strides = tensor.strides();
  return view;
}

const EpilogueInfo& epilogue_named(const Name& name) {
  const EpilogueInfo* info = find_epilogue(name.text().data(), name.text().size());
  if (info) return *info;
  std::string known;
  for (int i = 0; i < kEpilogueCount; ++i) known += std::string(i ? ", " : "") + epilogues()[i].name;
  fail("epilogue '", name.text(), "' is unknown; there are ", known);
}

const char* arithmetic_name(Arithmetic arithmetic) {
  constexpr const char* names[] = {"ieee", "tf32", "split", "scaled", "promoted", "fast"};
  return names[static_cast<int>(arithmetic)];
}

Arithmetic arithmetic_named(const Name& name) {
  for (Arithmetic arithmetic : {Arithmetic::IEEE, Arithmetic::TF32, Arithmetic::Split, Arithmetic::Scaled,
                                Arithmetic::Promoted, Arithmetic::Fast}) {
    if (name.text() == arithmetic_name(arithmetic)) return arithmetic;
  }
  fail("arithmetic '", name.text(), "' is unknown; there are ieee, tf32, split, scaled, promoted, fast");
}

ElementType element_of(const TensorView& tensor, const char* argument) {
  const int32_t dtype = tensor.dtype();
  if (dtype == aoti_torch_dtype_float16()) return ElementType::Float16;
  if (dtype == aoti_torch_dtype_bfloat16()) return ElementType::BFloat16;
  if (dtype == aoti_torch_dtype_float32()) return ElementType::Float32;
  if (dtype == aoti_torch_dtype_float64()) return ElementType::Float64;
  fail(argument, " has an unsupported dtype; accepted are float16, bfloat16, float32 and float64");
}

ElementType element_of_product(const TensorView& tensor, const char* argument) {
  if (tensor.dtype() == aoti_torch_dtype_float8_e4m3fn()) return ElementType::Float8E4M3;
  if (tensor.dtype() == aoti_torch_dtype_float8_e5m2()) return ElementType::Float8E5M2;
  return element_of(tensor, argument);
}

FoldVector vector_of(const std::optional<TensorView>& vector, int64_t columns, const TensorView& x,
                     const char* argument) {
  if (!vector) return {};
  check(vector->dim() == 1 && vector->size(0) == columns, argument, " has shape ", Shape{*vector}, ", expected [",
        columns, "]");
  check(vector->is_beside(x), argument, " is on another device than the matrix");
  return {vector->data(), vector->stride(0), element_of(*vector, argument)};
}

bool read_operands(const EpilogueInfo& epilogue, const std::optional<TensorView>& bias, const List<TensorView>& tensors,
                   const List<double>& scalars, bool is_pair, const ReadTensor& read, call::Tensor* storage,
                   call::GivenOperands* given) {
  std::size_t next_tensor = 0, next_scalar = 0;
  given->count = epilogue.operand_count - 1;
  for (int i = 0; i < given->count; ++i) {
    call::GivenOperand& operand = given->values[i];
    const bool is_scalar = epilogue.operands[i + 1].kind == OperandKind::Scalar;
    const TensorView* tensor = nullptr;
    if (is_pair && i + 1 == first_matrix(epilogue)) continue;
    if (i + 1 == epilogue.bias) {
      tensor = bias ? &*bias : nullptr;
    } else if (is_scalar && next_scalar < scalars.values.size()) {
      operand.number = scalars.values[next_scalar++];
      operand.has_number = true;
    } else if (next_tensor < tensors.values.size()) {
      tensor = &tensors.values[next_tensor++];
    } else {
      return false;
    }
    if (!tensor) continue;
    read(*tensor, epilogue.operands[i + 1].name, &storage[i]);
    operand.tensor = &storage[i];
  }
  return next_tensor == tensors.values.size() && next_scalar == scalars.values.size();
}

// Only CUDA builds of torch have the function, in a library that CPU builds lack: looked up, so that one module serves
// both.
void* current_stream(int device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  check(get_stream, "this build of torch has no CUDA");
  void* stream = nullptr;
  check_code(get_stream(device, &stream));
  return stream;
}

}  // namespace epigemm::binding
