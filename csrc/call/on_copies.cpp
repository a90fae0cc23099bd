#include "call/on_copies.h"

#include "elementwise/copy_rows.h"
#include "gemm/launch.h"
#include "gemm/planner/copies.h"

namespace epigemm::call {
namespace {

RowsCopy copy_of(const Matrix& from, const Matrix& to, int64_t rows, int64_t columns, int64_t filled) {
  return {from.data, from.row_stride, from.column_stride, to.data, to.row_stride, rows, columns, filled};
}

const char* run(const RowsCopy& first, const RowsCopy* second, const Problem& problem) {
#if EPIGEMM_WITH_CUDA
  return copy_rows_cuda(first, second, problem.device.index, problem.stream);
#else
  (void)first, (void)second, (void)problem;
  return "epigemm was built without CUDA";
#endif
}

const char* copy_operands(const Problem& problem, const Problem& on) {
  const Copies& copies = problem.copies;
  if (!copies.x && !copies.weight) return nullptr;
  const RowsCopy x = copy_of(problem.x, on.x, problem.m, problem.k, on.k);
  const RowsCopy weight = copy_of(problem.weight, on.weight, problem.n, problem.k, on.k);
  return run(copies.x ? x : weight, copies.x && copies.weight ? &weight : nullptr, problem);
}

}  // namespace

const char* launch_on_copies(const Problem& problem, const Plan& plan, const open::Kernels& kernels, void* workspace) {
  Problem on = on_copies(problem);
  place_copies(problem, workspace, &on);
  if (const char* const refused = copy_operands(problem, on)) return refused;
  if (const char* const refused = launch(on, plan, kernels)) return refused;
  if (!problem.copies.out) return nullptr;
  return run(copy_of(on.out, problem.out, problem.m, problem.n, problem.n), nullptr, problem);
}

}  // namespace epigemm::call
