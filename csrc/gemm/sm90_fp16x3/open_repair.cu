// The host's half of the repair and the fp32 product whose epilogue is linked in: no device code in here.
#include "gemm/sm90_fp16x3/repair.cuh"
#include "link/kernels.h"

namespace epigemm::sm90_fp16x3 {

const char* launch_open_repair(RepairProblem const& repair, const void* kernel) {
  return enqueue_repair(kernel, repair, link::operands_of(repair.split.problem), /*is_behind_gemm=*/true);
}

const char* launch_open_fp32(RepairProblem const& repair, const void* kernel) {
  return enqueue_repair(kernel, repair, link::operands_of(repair.split.problem), /*is_behind_gemm=*/false);
}

}  // namespace epigemm::sm90_fp16x3
