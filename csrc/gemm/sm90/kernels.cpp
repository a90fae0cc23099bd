#include "gemm/sm90/kernels.h"

#include "gemm/dispatch.h"

#define EPIGEMM_DECLARE(name)                                        \
  const char* launch_##name##_float16(Problem const&, Plan const&);  \
  const char* launch_##name##_bfloat16(Problem const&, Plan const&); \
  const char* launch_##name##_tf32(Problem const&, Plan const&);
#define EPIGEMM_DECLARE_LINEAR_AND_ELEMENTWISE(name) EPIGEMM_DECLARE(name)
#define EPIGEMM_DECLARE_ELEMENTWISE_ONLY(name)
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_DECLARE_##forms(name)

namespace epigemm::narrow {
#include "epilogue/registry.def"
}  // namespace epigemm::narrow

namespace epigemm::sm90 {
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

struct Unit {
  Launch float16, bfloat16, tf32;
};

#define EPIGEMM_UNIT_LINEAR_AND_ELEMENTWISE(family, name) \
  {&family::launch_##name##_float16, &family::launch_##name##_bfloat16, &family::launch_##name##_tf32},
#define EPIGEMM_UNIT_ELEMENTWISE_ONLY(family, name) {nullptr, nullptr, nullptr},

constexpr Unit kLargeUnits[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_UNIT_##forms(sm90, name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};
constexpr Unit kNarrowUnits[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_UNIT_##forms(narrow, name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

}  // namespace

Launch find_launch(EpilogueId epilogue, ElementType element, int tile) {
  const Unit& unit = (is_narrow(tile) ? kNarrowUnits : kLargeUnits)[static_cast<int>(epilogue)];
  switch (element) {
    case ElementType::Float16:
      return unit.float16;
    case ElementType::BFloat16:
      return unit.bfloat16;
    case ElementType::Float32:
      return unit.tf32;
    default:
      return nullptr;
  }
}

int kernel_count() {
  int units = 0;
  for (const Unit& unit : kLargeUnits) units += unit.float16 ? 3 : 0;
  return units * epigemm::kTileCount;
}

}  // namespace epigemm::sm90
