#include "gemm/sm90_fp16x3/repair.h"

#include "link/kernels.h"

namespace epigemm::sm90_fp16x3 {

#define EPIGEMM_DECLARE_LINEAR_AND_ELEMENTWISE(name) \
  const char* repair_##name(RepairProblem const&);   \
  const char* fp32_##name(RepairProblem const&);
#define EPIGEMM_DECLARE_ELEMENTWISE_ONLY(name)
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_DECLARE_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

struct Unit {
  Repair repair, fp32;
};

#define EPIGEMM_REPAIR_LINEAR_AND_ELEMENTWISE(name) {&repair_##name, &fp32_##name},
#define EPIGEMM_REPAIR_ELEMENTWISE_ONLY(name) {nullptr, nullptr},
constexpr Unit kUnits[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_REPAIR_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

const void* linked_kernel(link::Part part, RepairProblem const& repair) {
  link::KernelKey key;
  key.part = part;
  return link::find(repair.split.problem.epilogue, key);
}

const char* repair_by_linked(RepairProblem const& repair) {
  const void* const kernel = linked_kernel(link::Part::fixup, repair);
  return kernel ? launch_open_repair(repair, kernel) : link::kNotLinked;
}

const char* fp32_by_linked(RepairProblem const& repair) {
  const void* const kernel = linked_kernel(link::Part::fp32, repair);
  return kernel ? launch_open_fp32(repair, kernel) : link::kNotLinked;
}

}  // namespace

Repair find_repair(EpilogueId epilogue) {
  return is_built_in(epilogue) ? kUnits[static_cast<int>(epilogue)].repair : &repair_by_linked;
}

Repair find_fp32(EpilogueId epilogue) {
  return is_built_in(epilogue) ? kUnits[static_cast<int>(epilogue)].fp32 : &fp32_by_linked;
}

}  // namespace epigemm::sm90_fp16x3
