// The host's half of the kernels on fp16 slices: no device code in here.
#include <utility>

#include "gemm/sm90/launch.h"
#include "gemm/sm90_fp16x3/run.h"
#include "gemm/sm90_fp16x3/open_kernel.h"
#include "gemm/sm90_fp16x3/scaled_kernel.h"

namespace epigemm::sm90_fp16x3 {
namespace {

using LaunchTile = const char* (*)(SplitProblem const&, Plan const&, const void* kernel);

template <int TileIndex>
const char* launch_split(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  using Open = OpenKernel<TileIndex>;
  return run<typename Open::GemmKernel>(kernel, Open::arguments(problem, plan), problem.problem.stream);
}

template <int TileIndex>
const char* launch_scaled(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  const auto multiplied = [](SplitMatrix const& matrix) {
    return sm90::Multiplied{matrix.slices, matrix.padded_columns, matrix.roots};
  };
  return sm90::launch<ScaledTypes<TileIndex>>(problem.problem, plan, multiplied(problem.x), multiplied(problem.weight),
                                              problem.x.padded_columns, kernel);
}

template <int... TileIndex>
LaunchTile find_split(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_split<TileIndex>...};
  return launches[tile];
}

template <int... TileIndex>
LaunchTile find_scaled(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_scaled<TileIndex>...};
  return launches[tile];
}

}  // namespace

const char* launch_gemm(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  const LaunchTile launch = problem.problem.arithmetic == Arithmetic::Split
                                ? find_split(plan.tile, std::make_integer_sequence<int, kSplitTileCount>{})
                                : find_scaled(plan.tile, std::make_integer_sequence<int, kScaledTileCount>{});
  return launch(problem, plan, kernel);
}

}  // namespace epigemm::sm90_fp16x3
