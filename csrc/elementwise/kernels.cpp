#include "elementwise/kernels.h"

#include "elementwise/open.h"

namespace epigemm {

bool has_elementwise(EpilogueId epilogue, bool is_on_gpu) { return is_on_gpu || has_compiled_elementwise(epilogue); }

open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element) {
  open::KernelNames names;
  if (!has_compiled_elementwise(epilogue)) names.add(cuda::elementwise_kernel(element));
  return names;
}

}  // namespace epigemm
