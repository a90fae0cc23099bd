// The host's half of the kernels on fp16 slices: no device code in here.
#include "gemm/sm90/run.h"
#include "gemm/sm90_fp16x3/open_kernel.h"

namespace epigemm::sm90_fp16x3 {
namespace {

template <Arithmetic arithmetic, int TileIndex>
const char* launch_tile(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  using Open = OpenKernel<arithmetic, TileIndex>;
  return sm90::run<typename Open::GemmKernel>(kernel, Open::arguments(problem, plan), problem.problem.stream);
}

template <Arithmetic arithmetic, int... TileIndex>
const char* launch_arithmetic(SplitProblem const& problem, Plan const& plan, const void* kernel,
                              std::integer_sequence<int, TileIndex...>) {
  constexpr const char* (*launches[])(SplitProblem const&, Plan const&,
                                      const void*) = {&launch_tile<arithmetic, TileIndex>...};
  return launches[plan.tile](problem, plan, kernel);
}

}  // namespace

const char* launch_gemm(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  if (problem.problem.arithmetic == Arithmetic::Split) {
    return launch_arithmetic<Arithmetic::Split>(problem, plan, kernel,
                                                std::make_integer_sequence<int, kSplitTileCount>{});
  }
  return launch_arithmetic<Arithmetic::Scaled>(problem, plan, kernel,
                                               std::make_integer_sequence<int, kScaledTileCount>{});
}

}  // namespace epigemm::sm90_fp16x3
