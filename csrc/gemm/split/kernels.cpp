#include "gemm/split/kernels.h"

#include "gemm/split/tiles.h"

namespace epigemm::split {

#define EPIGEMM_DECLARE(name)                                          \
  const char* launch_##name##_split(SplitProblem const&, Plan const&); \
  const char* launch_##name##_scaled(SplitProblem const&, Plan const&);
#define EPIGEMM_DECLARE_LINEAR_AND_ELEMENTWISE(name) EPIGEMM_DECLARE(name)
#define EPIGEMM_DECLARE_ELEMENTWISE_ONLY(name)
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_DECLARE_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

struct Unit {
  Launch split, scaled;
};

#define EPIGEMM_UNIT_LINEAR_AND_ELEMENTWISE(name) {&launch_##name##_split, &launch_##name##_scaled},
#define EPIGEMM_UNIT_ELEMENTWISE_ONLY(name) {nullptr, nullptr},
constexpr Unit kUnits[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_UNIT_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

}  // namespace

Launch find_launch(EpilogueId epilogue, Arithmetic arithmetic) {
  const Unit& unit = kUnits[static_cast<int>(epilogue)];
  return arithmetic == Arithmetic::Split ? unit.split : unit.scaled;
}

int kernel_count() {
  int units = 0;
  for (const Unit& unit : kUnits) units += unit.split ? 1 : 0;
  return units * (kSplitTileCount + kScaledTileCount);
}

}  // namespace epigemm::split
