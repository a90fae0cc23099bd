#include "elementwise/kernels.h"

namespace epigemm {

open::KernelName elementwise_name(ElementwiseKernel which, ElementType element) {
  constexpr open::KernelName names[][4] = {
      {"epigemm_open_elementwise_float16", "epigemm_open_elementwise_bfloat16", "epigemm_open_elementwise_float32",
       "epigemm_open_elementwise_float64"},
      {"epigemm_open_derivative_float16", "epigemm_open_derivative_bfloat16", "epigemm_open_derivative_float32",
       "epigemm_open_derivative_float64"},
      {"epigemm_open_derivative_sums_float16", "epigemm_open_derivative_sums_bfloat16",
       "epigemm_open_derivative_sums_float32", "epigemm_open_derivative_sums_float64"}};
  return names[static_cast<int>(which)][static_cast<int>(element)];
}

open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element) {
  open::KernelNames names;
  if (!has_compiled_elementwise(epilogue)) names.add(elementwise_name(ElementwiseKernel::Value, element));
  return names;
}

}  // namespace epigemm
