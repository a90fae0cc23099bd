// The compiled kernels by epilogue. unit.cu.in makes them.
#include "elementwise/kernels.h"

namespace epigemm::cuda {

#define EPIGEMM_EPILOGUE(name, Functor, forms) const void* kernel_of_##name(ElementwiseKernel, ElementType);
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

const void* compiled_kernel(EpilogueId epilogue, ElementwiseKernel which, ElementType element) {
  using Find = const void* (*)(ElementwiseKernel, ElementType);
  constexpr Find kFind[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) &kernel_of_##name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
  };
  return kFind[static_cast<int>(epilogue)](which, element);
}

}  // namespace epigemm::cuda
