// The host's half of the kernels on fp16 slices: no device code in here.
#include <utility>

#include "gemm/sm90/launch.h"
#include "gemm/sm90_fp16x3/kernel.h"
#include "gemm/sm90_fp16x3/kernels.h"

namespace epigemm::sm90_fp16x3 {
namespace {

template <class Types>
const char* launch_tile(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  const auto multiplied = [](SplitMatrix const& matrix) {
    return sm90::Multiplied{matrix.slices, matrix.padded_columns * Types::kSlices, matrix.roots};
  };
  return sm90::launch<Types>(problem.problem, plan, multiplied(problem.x), multiplied(problem.weight),
                             problem.x.padded_columns, kernel);
}

using LaunchTile = const char* (*)(SplitProblem const&, Plan const&, const void* kernel);

template <template <int> class Types, int... TileIndex>
LaunchTile find_tile(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_tile<Types<TileIndex>>...};
  return launches[tile];
}

}  // namespace

const char* launch_gemm(SplitProblem const& problem, Plan const& plan, const void* kernel) {
  const LaunchTile launch =
      problem.problem.arithmetic == Arithmetic::Split
          ? find_tile<SplitTypes>(plan.tile, std::make_integer_sequence<int, kSplitTileCount>{})
          : find_tile<ScaledTypes>(plan.tile, std::make_integer_sequence<int, kScaledTileCount>{});
  return launch(problem, plan, kernel);
}

}  // namespace epigemm::sm90_fp16x3
