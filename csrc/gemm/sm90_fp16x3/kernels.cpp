#include "gemm/sm90_fp16x3/kernels.h"

#include "gemm/fp16_slices/kernels.h"
#include "gemm/planner/family.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  using fp16_slices::strided;
  if (problem.arithmetic != Arithmetic::IEEE && is_as_it_lies(problem.arithmetic, plan.tile)) {
    return fp16_slices::launch_as_it_lies(problem, plan, kernels, &launch_gemm, family().moment_rows(problem, plan));
  }
  if (problem.arithmetic != Arithmetic::IEEE) {
    return fp16_slices::launch(problem, plan, kernels, &launch_gemm, fp16_slices::FixupStart::BesideGemm,
                               family().moment_rows(problem, plan));
  }
  const fp16_slices::StridedMatrix x = strided(problem.x, problem.m, problem.k);
  const fp16_slices::StridedMatrix weight = strided(problem.weight, problem.n, problem.k);
  return fp16_slices::launch_fp32({{problem, {}, {}}, x, weight}, kernels.handles[0]);
}

}  // namespace epigemm::sm90_fp16x3
