#include "elementwise/kernels.h"

#include "elementwise/open.h"

namespace epigemm {

open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element) {
  open::KernelNames names;
  if (!has_compiled_elementwise(epilogue)) names.add(cuda::elementwise_kernel(element));
  return names;
}

}  // namespace epigemm
