#include "gemm/planner/architecture.h"
#include "gemm/planner/family.h"

namespace epigemm {

const char* family_name(FamilyId id) {
  constexpr const char* names[] = {
#define EPIGEMM_FAMILY(name) #name,
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
      "fallback",
  };
  return names[static_cast<int>(id)];
}

const Family& family_of(FamilyId id) {
  static const Family* const families[] = {
#define EPIGEMM_FAMILY(name) &name::family(),
#include "gemm/families.def"
#undef EPIGEMM_FAMILY
  };
  return *families[static_cast<int>(id)];
}

const Architecture& architecture_of(const Device& device) {
  static const Architecture* const architectures[] = {
#define EPIGEMM_ARCHITECTURE(name) &name::architecture(),
#include "gemm/architectures.def"
#undef EPIGEMM_ARCHITECTURE
  };
  for (const Architecture* architecture : architectures) {
    if (architecture->is_of(device)) return *architecture;
  }
  return *architectures[0];
}

}  // namespace epigemm
