#include "elementwise/open.h"

namespace epigemm::cuda {

open::KernelName elementwise_kernel(ElementType element) {
  constexpr open::KernelName names[] = {"epigemm_open_elementwise_float16", "epigemm_open_elementwise_bfloat16",
                                        "epigemm_open_elementwise_float32", "epigemm_open_elementwise_float64"};
  return names[static_cast<int>(element)];
}

open::KernelName derivative_kernel(ElementType element) {
  constexpr open::KernelName names[] = {"epigemm_open_derivative_float16", "epigemm_open_derivative_bfloat16",
                                        "epigemm_open_derivative_float32", "epigemm_open_derivative_float64"};
  return names[static_cast<int>(element)];
}

}  // namespace epigemm::cuda
