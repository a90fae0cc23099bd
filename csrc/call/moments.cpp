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
  return problem.has_moments && plan.is_fused() && family_of(plan.family).moment_rows(problem, plan) > 0;
}

bool are_blocks_left(const LinearCall& call, const Problem& problem, const Plan& plan) {
  return problem.has_moments && call.block_moments &&
         moment_blocks(problem.m, height_of(problem, plan)) <= call.block_moments->sizes[0];
}

int64_t moments_bytes(const LinearCall& call, const Problem& problem, const Plan& plan) {
  if (!problem.has_moments || are_blocks_left(call, problem, plan)) return 0;
  return block_moments_bytes(problem.x.element, problem.m, problem.n, height_of(problem, plan));
}

bool run_moments(const LinearCall& call, const Plan& plan, const Problem& problem, const Matrix& d, void* blocks,
                 Torch& torch) {
  if (!problem.has_moments) return true;
#if EPIGEMM_WITH_CUDA
  constexpr int kDependentCapability = 90;
  const MomentStream on{problem.device.index, problem.device.capability >= kDependentCapability, problem.stream};
  const char* refused = nullptr;
  if (!are_moments_in_kernel(problem, plan)) {
    refused = block_moments_cuda({d.data, d.element, d.row_stride, problem.m, problem.n}, blocks, on);
  }
  const bool are_left = are_blocks_left(call, problem, plan);
  if (call.block_rows) *call.block_rows = are_left ? height_of(problem, plan) : 0;
  char* const mean = static_cast<char*>(call.moments->data);
  MomentMerge merge;
  merge.blocks = blocks;
  merge.height = height_of(problem, plan);
  merge.element = problem.x.element;
  merge.rows = problem.m;
  merge.columns = problem.n;
  merge.mean = mean;
  merge.variance = mean + problem.n * moment_bytes(merge.element);
  if (!refused && !are_left) refused = merge_moments_cuda(merge, on);
  if (!refused) return true;
  torch.raise((std::string("the column statistics could not be launched: ") + refused).c_str());
#else
  (void)call, (void)plan, (void)d, (void)blocks;
  torch.raise("epigemm was built without CUDA");
#endif
  return false;
}

}  // namespace epigemm::call
