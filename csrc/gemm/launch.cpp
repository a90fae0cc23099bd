#include "gemm/launch.h"

#include "link/kernels.h"

namespace epigemm {

// Each family's. `kernel`: the plan's with the epilogue in it, a cudaKernel_t.
using LaunchKernel = const char* (*)(Problem const& problem, Plan const& plan, const void* kernel);

#define EPIGEMM_FAMILY(name)                                                        \
  namespace name {                                                                  \
  const char* launch(Problem const& problem, Plan const& plan, const void* kernel); \
  }
#include "gemm/families.def"
#undef EPIGEMM_FAMILY

const char* launch(Problem const& problem, Plan const& plan) {
  constexpr LaunchKernel launches[] = {
#define EPIGEMM_FAMILY(name) &name::launch,
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  };
  const void* const kernel = link::find(problem.epilogue, link::key_of(problem, plan));
  return kernel ? launches[static_cast<int>(plan.family)](problem, plan, kernel) : link::kNotLinked;
}

}  // namespace epigemm
