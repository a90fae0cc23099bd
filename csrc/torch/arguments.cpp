#include "torch/arguments.h"
#include "epilogue/builtin.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

namespace epigemm::binding {
namespace {

ElementType compute_element(ElementType element) {
  return element == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32;
}

void check_device(const TensorView& tensor, const TensorView& x, const char* argument) {
  check(tensor.is_beside(x), argument, " is on another device than x");
}

void check_element(const TensorView& tensor, ElementType wanted, const char* argument) {
  const ElementType got = element_of(tensor, argument);
  check(got == wanted, argument, " has dtype ", element_name(got), ", expected ", element_name(wanted));
}

OperandValue vector_value(const TensorView& vector, const char* name, int64_t columns) {
  check(vector.dim() == 1 && vector.size(0) == columns, name, " has shape ", Shape{vector}, ", expected [", columns,
        "]");
  return {vector.data(), vector.stride(0), 0};
}

OperandValue scalar_value(const TensorView& scalar, const char* name) {
  check(scalar.numel() == 1, name, " has shape ", Shape{scalar}, ", expected one element");
  return {scalar.data(), 0, 0};
}

// How many consecutive rows of x a row of a tensor is for: 1 if it has x's leading sizes, more if it shares rows, x is
// a matrix and the tensor's rows divide x's; 0 if it has other sizes.
int64_t rows_each_of(const TensorView& tensor, const TensorView& x, bool shares_rows) {
  if (tensor.dim() != x.dim() || x.dim() == 0) return 0;
  if (std::equal(x.sizes(), x.sizes() + x.dim() - 1, tensor.sizes())) return 1;
  if (!shares_rows || x.dim() != 2 || tensor.size(0) == 0 || x.size(0) % tensor.size(0) != 0) return 0;
  return x.size(0) / tensor.size(0);
}

// A tensor with x's leading sizes (rows_each_of) and then `columns`.
OperandValue matrix_value(const TensorView& tensor, const Operand& operand, const TensorView& x, int64_t columns) {
  const char* const name = operand.name;
  const int64_t each = rows_each_of(tensor, x, operand.shares_rows);
  check(each > 0 && tensor.size(x.dim() - 1) == columns, name, " has shape ", Shape{tensor}, ", expected x's with ",
        columns, " in place of the last dimension");
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) rows *= tensor.size(axis);
  Matrix matrix;
  check(call::as_matrix(view_of(tensor, ElementType::Float32, nullptr), rows, columns, &matrix), name,
        " must be a matrix: its last dimension contiguous, the others one stride apart");
  return {tensor.data(), columns == 1 && rows == 1 ? 1 : matrix.row_stride, 0, each};
}

OperandValue tensor_value(const TensorView& tensor, const Operand& operand, const TensorView& x, ElementType input,
                          int64_t columns) {
  check_device(tensor, x, operand.name);
  check_element(tensor, operand.element == OperandElement::Input ? input : compute_element(input), operand.name);
  const KindTraits traits = traits_of(operand.kind);
  if (traits.by_row) return matrix_value(tensor, operand, x, traits.by_column ? columns : 1);
  return traits.by_column ? vector_value(tensor, operand.name, columns) : scalar_value(tensor, operand.name);
}

}  // namespace

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
  constexpr const char* names[] = {"ieee", "tf32", "split", "scaled"};
  return names[static_cast<int>(arithmetic)];
}

Arithmetic arithmetic_named(const Name& name) {
  for (Arithmetic arithmetic : {Arithmetic::IEEE, Arithmetic::TF32, Arithmetic::Split, Arithmetic::Scaled}) {
    if (name.text() == arithmetic_name(arithmetic)) return arithmetic;
  }
  fail("arithmetic '", name.text(), "' is unknown; there are ieee, tf32, split, scaled");
}

ElementType element_of(const TensorView& tensor, const char* argument) {
  const int32_t dtype = tensor.dtype();
  if (dtype == aoti_torch_dtype_float16()) return ElementType::Float16;
  if (dtype == aoti_torch_dtype_bfloat16()) return ElementType::BFloat16;
  if (dtype == aoti_torch_dtype_float32()) return ElementType::Float32;
  if (dtype == aoti_torch_dtype_float64()) return ElementType::Float64;
  fail(argument, " has an unsupported dtype; accepted are float16, bfloat16, float32 and float64");
}

FoldVector vector_of(const std::optional<TensorView>& vector, int64_t columns, const TensorView& x,
                     const char* argument) {
  if (!vector) return {};
  check(vector->dim() == 1 && vector->size(0) == columns, argument, " has shape ", Shape{*vector}, ", expected [",
        columns, "]");
  check(vector->is_beside(x), argument, " is on another device than the matrix");
  return {vector->data(), vector->stride(0), element_of(*vector, argument)};
}

void fill_operands(const EpilogueInfo& epilogue, const TensorView& x, int64_t columns,
                   const std::optional<TensorView>& bias, const List<TensorView>& tensors, const List<double>& scalars,
                   OperandValue* values) {
  const ElementType input = element_of(x, "x");
  std::size_t next_tensor = 0, next_scalar = 0;
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const Operand& operand = epilogue.operands[i];
    OperandValue& value = values[i - 1];
    if (i == epilogue.bias) {
      if (bias) value = tensor_value(*bias, operand, x, input, columns);
    } else if (operand.kind == OperandKind::Scalar && next_scalar < scalars.values.size()) {
      value.value = scalars.values[next_scalar++];
    } else {
      check(next_tensor < tensors.values.size(), "epilogue '", epilogue.name, "' needs operand ", operand.name);
      value = tensor_value(tensors.values[next_tensor++], operand, x, input, columns);
    }
  }
  check(epilogue.bias > 0 || !bias, "epilogue '", epilogue.name, "' takes no bias");
  check(next_tensor == tensors.values.size() && next_scalar == scalars.values.size(), "epilogue '", epilogue.name,
        "' takes ", next_tensor, " operand tensors and ", next_scalar, " scalars here, got ", tensors.values.size(),
        " and ", scalars.values.size());
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
