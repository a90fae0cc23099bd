#include "gemm/launch.h"
#include "gemm/sm90_swap_ab/tiles.h"
#include "link/kernels.h"

namespace epigemm::sm90_swap_ab {

#include "gemm/sm90/unit_table.inc"

}  // namespace epigemm::sm90_swap_ab
