#include "gemm/fp16_slices/kernels.h"

#include "gemm/fp16_slices/split_rows.h"
#include "gemm/fp16_slices/weight_roots.h"

namespace epigemm::fp16_slices {

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels, LaunchGemm launch_gemm,
                   FixupStart fixup_start, int block_rows) {
  if (!problem.workspace) return "fp16 slices need a workspace";
  const StridedMatrix x = strided(problem.x, problem.m, problem.k);
  const StridedMatrix weight = strided(problem.weight, problem.n, problem.k);
  const int slices = slices_of(problem.arithmetic);
  void* const x_buffer = problem.workspace;
  void* weight_buffer = problem.packed_weight;
  // x's split starts beside the weight's, where there are dependent launches, and ends behind it: what waits for x's
  // slices has the weight's, too.
  const auto split = [&](StridedMatrix const& matrix, void* buffer, bool is_beside) {
    return split_rows_cuda(matrix, slices, buffer, problem.device.index, problem.stream, SliceOrder::Plain, is_beside);
  };
  const bool is_beside = !weight_buffer && fixup_start == FixupStart::BesideGemm;
  if (!weight_buffer) {
    weight_buffer = static_cast<char*>(x_buffer) + split_bytes(problem.m, problem.k, slices);
    if (const char* const refused = split(weight, weight_buffer, /*is_beside=*/false)) return refused;
  }
  if (const char* const refused = split(x, x_buffer, is_beside)) return refused;
  const SplitProblem split_problem{problem, split_view(x_buffer, problem.m, problem.k, slices),
                                   split_view(weight_buffer, problem.n, problem.k, slices)};
  const char* const refused = launch_gemm(split_problem, plan, kernels.handles[0]);
  return refused ? refused : launch_fixup({split_problem, x, weight, block_rows}, kernels.handles[1], fixup_start);
}

const char* launch_as_it_lies(Problem const& problem, Plan const& plan, open::Kernels const& kernels,
                              LaunchGemm launch_gemm, int block_rows) {
  if (!problem.workspace) return "fp16 slices need a workspace";
  const SliceOrder order = order_beside(problem);
  const StridedMatrix x = strided(problem.x, problem.m, problem.k);
  const StridedMatrix weight = strided(problem.weight, problem.n, problem.k);
  const int slices = slices_of(problem.arithmetic), device = problem.device.index;
  void* const x_buffer = problem.workspace;
  void* const of_weight = static_cast<char*>(x_buffer) + split_bytes(problem.m, problem.k, slices, order);
  const Weights weights{weight, weights_of(problem), problem.groups.weight_stride};
  const int64_t rows = weights.rows();
  const Remembered remembered = remembered_roots(weights, device, problem.stream);
  // Weights of groups without rows have no tile that writes what is known of them.
  int32_t* const unwritten = problem.groups ? statistics_of_groups(of_weight, rows) : nullptr;
  const char* refused =
      weight_roots_cuda(weights, remembered, first_roots(of_weight, rows), unwritten, device, problem.stream);
  if (!refused) {
    refused = split_rows_cuda(x, slices, x_buffer, device, problem.stream, order, /*is_beside_kernel_ahead=*/true);
  }
  if (refused) return refused;
  const SplitProblem split_problem{problem, split_view(x_buffer, problem.m, problem.k, slices, order),
                                   rows_view(of_weight, rows, problem.k), remembered.roots};
  refused = launch_gemm(split_problem, plan, kernels.handles[0]);
  if (refused) return refused;
  return launch_fixup({split_problem, x, weight, block_rows, /*is_weight_judged_late=*/true}, kernels.handles[1],
                      FixupStart::BesideGemm);
}

}  // namespace epigemm::fp16_slices
