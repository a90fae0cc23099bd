// The host's half of the kernels on fp16 slices: no device code in here.
#include <utility>

#include "gemm/sm90/launch.h"
#include "gemm/sm90_fp16x3/kernel.h"
#include "gemm/sm90_fp16x3/kernels.h"

namespace epigemm::sm90_fp16x3 {
namespace {

using fp16_slices::SplitMatrix;
using fp16_slices::SplitProblem;

template <Arithmetic arithmetic, int TileIndex>
const char* launch_tile(SplitProblem const& split, Plan const& plan, const void* kernel) {
  using Types = sm90_fp16x3::Types<arithmetic, TileIndex>;
  const auto multiplied = [](SplitMatrix const& matrix) {
    return sm90::Multiplied{matrix.slices, matrix.padded_columns * Types::kSlices, matrix.roots};
  };
  return sm90::launch<Types>(split.problem, plan, multiplied(split.x), multiplied(split.weight), split.x.padded_columns,
                             kernel);
}

template <Arithmetic arithmetic, int... TileIndex>
const char* launch_arithmetic(SplitProblem const& split, Plan const& plan, const void* kernel,
                              std::integer_sequence<int, TileIndex...>) {
  constexpr const char* (*launches[])(SplitProblem const&, Plan const&,
                                      const void*) = {&launch_tile<arithmetic, TileIndex>...};
  return launches[plan.tile](split, plan, kernel);
}

}  // namespace

const char* launch_gemm(SplitProblem const& split, Plan const& plan, const void* kernel) {
  if (split.problem.arithmetic == Arithmetic::Split) {
    return launch_arithmetic<Arithmetic::Split>(split, plan, kernel,
                                                std::make_integer_sequence<int, kSplitTileCount>{});
  }
  return launch_arithmetic<Arithmetic::Scaled>(split, plan, kernel,
                                               std::make_integer_sequence<int, kScaledTileCount>{});
}

}  // namespace epigemm::sm90_fp16x3
