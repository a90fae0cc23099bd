#include "gemm/launch.h"

namespace epigemm {

#define EPIGEMM_FAMILY(name)                       \
  namespace name {                                 \
  const char* launch(Problem const&, Plan const&); \
  int kernel_count();                              \
  }
#include "gemm/families.def"
#undef EPIGEMM_FAMILY

const char* launch(Problem const& problem, Plan const& plan) {
  constexpr Launch launches[] = {
#define EPIGEMM_FAMILY(name) &name::launch,
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  };
  return launches[static_cast<int>(plan.family)](problem, plan);
}

int gemm_kernel_count() {
  int count = 0;
#define EPIGEMM_FAMILY(name) count += name::kernel_count();
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  return count;
}

}  // namespace epigemm
