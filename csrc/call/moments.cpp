#include "call/moments.h"

#include <string>

#include "gemm/grid.h"
#include "gemm/planner/family.h"
#include "reduce/column_moments.h"

namespace epigemm::call {
namespace {

constexpr int64_t kSection = 256;  // bytes: where the rows' blocks begin

// The rows of a block of the columns.
int height_of(const Problem& problem, const Plan& plan) {
  return are_moments_in_kernel(problem, plan) ? family_of(plan.family).moment_rows(problem, plan) : kMomentRows;
}

int64_t column_bytes(const LinearCall& call, const Problem& problem, const Plan& plan) {
  if (!has_column_moments(call, problem, plan) || are_blocks_left(call, problem, plan)) return 0;
  return round_up(block_moments_bytes(problem.x.element, problem.m, problem.n, height_of(problem, plan)), kSection);
}

int64_t row_bytes(const LinearCall& call, const Problem& problem, const Plan& plan) {
  if (!has_row_moments(call, problem, plan)) return 0;
  const int width = family_of(plan.family).moment_columns(problem, plan);
  return block_moments_bytes(problem.x.element, problem.n, problem.m, width);
}

#if EPIGEMM_WITH_CUDA
// Of rows x columns numbers, in blocks of `height` rows, to `moments` [3, columns].
const char* merge(const void* blocks, int height, int64_t rows, int64_t columns, const Tensor& moments,
                  ElementType element, const MomentStream& on) {
  return merge_moments_cuda({blocks, height, element, rows, columns, moments.data}, on);
}
#endif

}  // namespace

bool are_moments_in_kernel(const Problem& problem, const Plan& plan) {
  return problem.has_moments() && plan.is_fused() && family_of(plan.family).moment_rows(problem, plan) > 0;
}

bool has_column_moments(const LinearCall& call, const Problem& problem, const Plan& plan) {
  return call.column_moments && (call.needs_column_moments || are_moments_in_kernel(problem, plan));
}

bool has_row_moments(const LinearCall& call, const Problem& problem, const Plan& plan) {
  return call.row_moments && are_moments_in_kernel(problem, plan);
}

bool are_blocks_left(const LinearCall& call, const Problem& problem, const Plan& plan) {
  return has_column_moments(call, problem, plan) && call.column_blocks &&
         moment_blocks(problem.m, height_of(problem, plan)) <= call.column_blocks->sizes[0];
}

int64_t moments_bytes(const LinearCall& call, const Problem& problem, const Plan& plan) {
  return column_bytes(call, problem, plan) + row_bytes(call, problem, plan);
}

MomentBlocks place_blocks(const LinearCall& call, const Problem& problem, const Plan& plan, char* workspace) {
  MomentBlocks blocks;
  const int64_t of_columns = column_bytes(call, problem, plan);
  if (of_columns > 0) blocks.of_columns = workspace;
  if (are_blocks_left(call, problem, plan)) blocks.of_columns = call.column_blocks->data;
  if (has_row_moments(call, problem, plan)) blocks.of_rows = workspace + of_columns;
  return blocks;
}

bool run_moments(const LinearCall& call, const Plan& plan, const Problem& problem, const Matrix& d,
                 const MomentBlocks& blocks, Torch& torch) {
  if (!problem.has_moments()) return true;
  const bool is_within = are_moments_in_kernel(problem, plan), are_left = are_blocks_left(call, problem, plan);
  if (call.given) *call.given = {is_within, are_left ? height_of(problem, plan) : 0};
#if EPIGEMM_WITH_CUDA
  constexpr int kDependentCapability = 90;
  const MomentStream on{problem.device.index, problem.device.capability >= kDependentCapability, problem.stream};
  const ElementType element = problem.x.element;
  const char* refused = nullptr;
  if (has_column_moments(call, problem, plan)) {
    if (!is_within) {
      refused = block_moments_cuda({d.data, d.element, d.row_stride, problem.m, problem.n}, blocks.of_columns, on);
    }
    if (!refused && !are_left) {
      refused =
          merge(blocks.of_columns, height_of(problem, plan), problem.m, problem.n, *call.column_moments, element, on);
    }
  }
  if (!refused && has_row_moments(call, problem, plan)) {
    // Rows and columns are exchanged.
    refused = merge(blocks.of_rows, family_of(plan.family).moment_columns(problem, plan), problem.n, problem.m,
                    *call.row_moments, element, on);
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
