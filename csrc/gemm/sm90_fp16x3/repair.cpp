#include "gemm/sm90_fp16x3/repair.h"

namespace epigemm::sm90_fp16x3 {

#define EPIGEMM_DECLARE_LINEAR_AND_ELEMENTWISE(name) \
  void repair_##name(RepairProblem const&);          \
  void fp32_##name(RepairProblem const&);
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

}  // namespace

Repair find_repair(EpilogueId epilogue) { return kUnits[static_cast<int>(epilogue)].repair; }

Repair find_fp32(EpilogueId epilogue) { return kUnits[static_cast<int>(epilogue)].fp32; }

}  // namespace epigemm::sm90_fp16x3
