#include "gemm/launch.h"

namespace epigemm {

using LaunchKernels = const char* (*)(Problem const& problem, Plan const& plan, open::Kernels const& kernels);

#define EPIGEMM_FAMILY(name)                                                                  \
  namespace name {                                                                            \
  const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels); \
  }
#include "gemm/families.def"
#undef EPIGEMM_FAMILY

bool has_gemm_kernels() { return true; }

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  constexpr LaunchKernels launches[] = {
#define EPIGEMM_FAMILY(name) &name::launch,
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  };
  return launches[static_cast<int>(plan.family)](problem, plan, kernels);
}

}  // namespace epigemm
