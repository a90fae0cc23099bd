#include "gemm/launch.h"
#include "gemm/sm90_tma/tiles.h"
#include "link/kernels.h"

namespace epigemm::sm90_tma {

#include "gemm/sm90/unit_table.inc"

}  // namespace epigemm::sm90_tma
