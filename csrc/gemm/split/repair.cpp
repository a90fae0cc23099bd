#include "gemm/split/repair.h"

namespace epigemm::split {

#define EPIGEMM_DECLARE_LINEAR_AND_ELEMENTWISE(name) void repair_##name(RepairProblem const&);
#define EPIGEMM_DECLARE_ELEMENTWISE_ONLY(name)
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_DECLARE_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

#define EPIGEMM_REPAIR_LINEAR_AND_ELEMENTWISE(name) &repair_##name,
#define EPIGEMM_REPAIR_ELEMENTWISE_ONLY(name) nullptr,
constexpr Repair kRepairs[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) EPIGEMM_REPAIR_##forms(name)
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

}  // namespace

Repair find_repair(EpilogueId epilogue) { return kRepairs[static_cast<int>(epilogue)]; }

}  // namespace epigemm::split
