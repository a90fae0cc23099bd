#include "call/kernels.h"

#include "elementwise/kernels.h"
#include "gemm/planner/family.h"

namespace epigemm::call {

open::KernelNames kernels_of(const Problem& problem, const Plan& plan) {
  if (plan.is_fused()) return family_of(plan.family).kernels(problem, plan);
  return elementwise_kernels(problem.epilogue, problem.x.element);
}

}  // namespace epigemm::call
