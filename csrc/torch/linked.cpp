// Epilogues that are made at run time: registering them, loading their kernels, and the calls that only they have.
#include "call/kernels.h"
#include "link/kernels.h"
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

// The name of the elementwise kernel that has to be linked for an x of this type; empty if there is one. `kind`: an
// ElementwiseKernel.
std::string missing_elementwise(const Name& epilogue, const TensorView& x, int64_t kind) {
  const EpilogueId id = epilogue_named(epilogue).id;
  const auto which = static_cast<ElementwiseKernel>(kind);
  const ElementType element = element_of(x, "x");
  const KernelForms kernel = call::elementwise_kernel(id, which, element, cuda::device(x.device()).capability);
  return std::string(kernel.any ? open::KernelName() : elementwise_name(which, element));
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
