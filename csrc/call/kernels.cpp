#include "call/kernels.h"

#include "gemm/planner/family.h"
#include "link/kernels.h"

namespace epigemm::call {

open::KernelNames kernels_of(const Problem& problem, const Plan& plan) {
  if (plan.is_fused()) return family_of(plan.family).kernels(problem, plan);
  if (is_8_bits(problem.out.element)) return {};  // Python computes what follows the product
  return elementwise_kernels(problem.epilogue, problem.out.element);
}

KernelForms elementwise_kernel(EpilogueId epilogue, ElementwiseKernel which, ElementType element, int capability) {
#if EPIGEMM_WITH_CUDA
  if (has_compiled_elementwise(epilogue)) return cuda::compiled_kernel(epilogue, which, element);
#endif
  return {link::find(epilogue, capability, elementwise_name(which, element))};
}

}  // namespace epigemm::call
