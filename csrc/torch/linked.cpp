// Epilogues that are made at run time: registering them, loading their kernels, and the calls that only they have.
#include "call/operands.h"
#include "elementwise/open.h"
#include "link/kernels.h"
#include "open/slots.h"
#include "torch/arguments.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::binding {
namespace {

// `kinds`: one OperandKind each; `forms`: bit 0: the operand has the type of the epilogue's arithmetic, bit 1: it
// shares rows; `bias`, `has_store`: as of EpilogueInfo; `primitives`, `has_short_forms`: as of functor_cost.
int64_t register_epilogue(const Name& name, const Name& operand_names, const List<int64_t>& kinds,
                          const List<int64_t>& forms, int64_t bias, const Name& primitives, bool has_short_forms,
                          bool has_store) {
  const std::vector<std::string> names = split(operand_names.text());
  check(names.size() == kinds.values.size() && names.size() == forms.values.size(), "names, kinds, forms: got ",
        names.size(), ", ", kinds.values.size(), " and ", forms.values.size(), " of them; accepted are as many each");
  const bool is_bias = bias > 0 && bias <= static_cast<int64_t>(names.size()) &&
                       kinds.values[bias - 1] == static_cast<int>(OperandKind::PerColumn) && !forms.values[bias - 1];
  check(bias == 0 || is_bias, "bias: got ", bias, "; accepted are 0 and the place of a vector along N of x's type");
  check(names.size() <= kMaxOperands, "names: got ", names.size(), " operands; accepted are at most ", kMaxOperands);
  std::vector<RegisteredOperand> operands{{OperandKind::Accumulator, OperandElement::Compute, "accumulator"}};
  for (std::size_t i = 0; i < names.size(); ++i) {
    const int64_t kind = kinds.values[i];
    check(kind > static_cast<int>(OperandKind::Accumulator) && kind < kOperandKinds, "kinds: there is no kind ", kind);
    operands.push_back({static_cast<OperandKind>(kind),
                        forms.values[i] & 1 ? OperandElement::Compute : OperandElement::Input, names[i],
                        (forms.values[i] & 2) != 0});
  }
  return static_cast<int64_t>(register_epilogue(std::string(name.text()), operands, static_cast<int>(bias),
                                                functor_cost(primitives.text(), has_short_forms), has_store));
}

#if EPIGEMM_WITH_CUDA

// `capability`: of the GPU whose machine code it is, as in Device.
void add_kernel(const Name& epilogue, int64_t capability, const Name& kernel, const TensorView& cubin) {
  check(!cubin.is_cuda() && cubin.dim() == 1 && cubin.is_contiguous(), "cubin must be a contiguous vector on the CPU");
  const char* const refused =
      link::add(epilogue_named(epilogue).id, static_cast<int>(capability), kernel.text(), cubin.data());
  check(!refused, "the linked kernel ", kernel.text(), " could not be loaded: ", refused ? refused : "");
}

// The name of the kernel that an elementwise call needs; empty if it is loaded.
std::string missing_elementwise(const Name& epilogue, const TensorView& x, bool is_derivative) {
  const ElementType element = element_of(x, "x");
  const open::KernelName name = is_derivative ? cuda::derivative_kernel(element) : cuda::elementwise_kernel(element);
  const int capability = cuda::device(x.device()).capability;
  return link::find(epilogue_named(epilogue).id, capability, name) ? std::string() : std::string(name);
}

const void* linked_kernel(EpilogueId epilogue, int device, open::KernelName name) {
  const void* const kernel = link::find(epilogue, cuda::device(device).capability, name);
  check(kernel != nullptr, "the epilogue was not linked for ", name);
  return kernel;
}

Matrix matrix_of(const TensorView& tensor, const char* name) {
  Matrix matrix;
  const ElementType element = element_of(tensor, name);
  check(tensor.dim() == 2 && call::as_matrix(view_of(tensor, element, const_cast<void*>(tensor.data())), tensor.size(0),
                                             tensor.size(1), &matrix),
        name, " must be a matrix with contiguous rows, got shape ", Shape{tensor});
  return matrix;
}

open::Operands<double> operands_of(const EpilogueInfo& epilogue, const TensorView& x,
                                   const std::optional<TensorView>& bias, const List<TensorView>& tensors,
                                   const List<double>& scalars) {
  OperandValue values[kMaxOperands];
  fill_operands(epilogue, x, x.size(1), bias, tensors, scalars, values);
  return open::by_slot<double>(epilogue, values);
}

void check_same_shape(const TensorView& tensor, const TensorView& x, const char* name) {
  check(tensor.dim() == 2 && tensor.size(0) == x.size(0) && tensor.size(1) == x.size(1), name, " has shape ",
        Shape{tensor}, ", expected x's, ", Shape{x});
  check(tensor.is_beside(x), name, " must be on x's device");
}

bool is_compute(ElementType element, ElementType x) {
  return element == (x == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32);
}

cuda::OpenGradient gradient_into(const TensorView& out, const TensorView& acc, ElementType x) {
  check_same_shape(out, acc, "outs");
  check(out.is_contiguous(), "outs must be contiguous");
  const ElementType element = element_of(out, "outs");
  check(element == x || is_compute(element, x), "outs must have grad's dtype or the arithmetic's");
  return {out.mutable_data(), is_compute(element, x)};
}

// Writes grad * d epilogue / d slot to each of `outs`; slot -1 is the accumulator. grad has the dtype of the call's x,
// acc the same or the arithmetic's.
void linked_derivative_out(const Name& epilogue_name, const TensorView& grad, const TensorView& acc,
                           const std::optional<TensorView>& bias, const List<TensorView>& operands,
                           const List<double>& scalars, const List<int64_t>& slots, const List<TensorView>& outs) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  const Matrix of_grad = matrix_of(grad, "grad"), of_acc = matrix_of(acc, "acc");
  check_same_shape(grad, acc, "grad");
  const ElementType element = of_grad.element;
  check(of_acc.element == element || is_compute(of_acc.element, element),
        "acc must have grad's dtype or the arithmetic's");
  check(slots.values.size() == outs.values.size(), "slots, outs: accepted are as many each");
  cuda::OpenDerivative problem;
  problem.element = element;
  problem.m = acc.size(0);
  problem.n = acc.size(1);
  problem.grad = of_grad.data;
  problem.grad_row_stride = of_grad.row_stride;
  problem.acc = of_acc.data;
  problem.acc_row_stride = of_acc.row_stride;
  problem.is_acc_of_compute = is_compute(of_acc.element, element);
  for (std::size_t i = 0; i < slots.values.size(); ++i) {
    const int64_t slot = slots.values[i];
    check(slot >= -1 && slot < open::kSlots, "slots: there is no slot ", slot);
    (slot < 0 ? problem.of_acc : problem.of_slot[slot]) = gradient_into(outs.values[i], acc, element);
  }
  problem.operands = operands_of(epilogue, grad, bias, operands, scalars);
  const CurrentDevice guard(acc.device());
  problem.stream = current_stream(acc.device());
  const void* const kernel = linked_kernel(epilogue.id, acc.device(), cuda::derivative_kernel(problem.element));
  const char* refused = cuda::launch_open_derivative(problem, kernel);
  check(!refused, "the linked kernel could not be launched: ", refused ? refused : "");
}

#endif

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_register_epilogue", TORCH_BOX(&epigemm::binding::register_epilogue));
#if EPIGEMM_WITH_CUDA
  m.impl("_add_kernel", TORCH_BOX(&epigemm::binding::add_kernel));
  m.impl("_missing_elementwise", TORCH_BOX(&epigemm::binding::missing_elementwise));
#endif
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_linked_derivative_out", TORCH_BOX(&epigemm::binding::linked_derivative_out));
}
#endif
