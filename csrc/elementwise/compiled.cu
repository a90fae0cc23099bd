// The compiled kernels by epilogue. unit.cu.in makes them.
#include "elementwise/kernels.h"

namespace epigemm::cuda {

#define EPIGEMM_EPILOGUE(name, Functor, forms) KernelForms kernel_of_##name(ElementwiseKernel, ElementType);
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

KernelForms compiled_kernel(EpilogueId epilogue, ElementwiseKernel which, ElementType element) {
  using Find = KernelForms (*)(ElementwiseKernel, ElementType);
  constexpr Find kFind[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) &kernel_of_##name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
  };
  return kFind[static_cast<int>(epilogue)](which, element);
}

}  // namespace epigemm::cuda
