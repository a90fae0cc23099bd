#include "call/kernels.h"

#include "elementwise/open.h"
#include "gemm/planner/family.h"

namespace epigemm::call {

open::KernelNames kernels_of(const Problem& problem, const Plan& plan) {
  if (plan.is_fused()) return family_of(plan.family).kernels(problem, plan);
  open::KernelNames names;
  if (!has_compiled_elementwise(problem.epilogue)) names.add(cuda::elementwise_kernel(problem.x.element));
  return names;
}

}  // namespace epigemm::call
