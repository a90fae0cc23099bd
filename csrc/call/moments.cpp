#include "call/moments.h"

#include <string>

#include "gemm/planner/family.h"
#include "reduce/column_moments.h"

namespace epigemm::call {
namespace {

// The rows of a block.
int height_of(const Problem& problem, const Plan& plan) {
  return are_moments_in_kernel(problem, plan) ? family_of(plan.family).moment_rows(problem, plan) : kMomentRows;
}

}  // namespace

bool are_moments_in_kernel(const Problem& problem, const Plan& plan) {
  return problem.has_column_moments && plan.is_fused() && family_of(plan.family).moment_rows(problem, plan) > 0;
}

bool are_blocks_left(const LinearCall& call, const Problem& problem, const Plan& plan) {
  return call.column_blocks && moment_blocks(problem.m, height_of(problem, plan)) <= call.column_blocks->sizes[0];
}

int64_t moments_bytes(const LinearCall& call, const Problem& problem, const Plan& plan) {
  if (!problem.has_column_moments || are_blocks_left(call, problem, plan)) return 0;
  return block_moments_bytes(problem.x.element, problem.m, problem.n, height_of(problem, plan));
}

void* place_blocks(const LinearCall& call, const Problem& problem, const Plan& plan, char* workspace) {
  if (!problem.has_column_moments) return nullptr;
  return are_blocks_left(call, problem, plan) ? call.column_blocks->data : workspace;
}

bool run_moments(const LinearCall& call, const Plan& plan, const Problem& problem, const Matrix& d, void* blocks,
                 Torch& torch) {
  if (!problem.has_column_moments) return true;
  const bool are_left = are_blocks_left(call, problem, plan);
  const int height = height_of(problem, plan);
  if (call.left_rows) *call.left_rows = are_left ? height : 0;
#if EPIGEMM_WITH_CUDA
  constexpr int kDependentCapability = 90;
  const MomentStream on{problem.device.index, problem.device.capability >= kDependentCapability, problem.stream};
  const char* refused = nullptr;
  if (!are_moments_in_kernel(problem, plan)) {
    refused = block_moments_cuda({d.data, d.element, d.row_stride, problem.m, problem.n}, blocks, on);
  }
  if (!refused && !are_left) {
    refused =
        merge_moments_cuda({blocks, height, problem.x.element, problem.m, problem.n, call.column_moments->data}, on);
  }
  if (!refused) return true;
  torch.raise((std::string("the statistics could not be launched: ") + refused).c_str());
#else
  (void)d, (void)blocks;
  torch.raise("epigemm was built without CUDA");
#endif
  return false;
}

}  // namespace epigemm::call
