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

// The weight as it lies: `split.weight` has no slices, and its roots and statistics are written by the kernel.
template <Arithmetic arithmetic, int TileIndex, bool IsTransposed>
const char* launch_as_it_lies(SplitProblem const& split, Plan const& plan, const void* kernel) {
  using Types = AsItLies<arithmetic, TileIndex, IsTransposed>;
  using Mainloop = typename sm90::Kernel<Types>::Mainloop;
  Problem const& problem = split.problem;
  if constexpr (!IsTransposed) {
    if (problem.is_weight_transposed) return launch_as_it_lies<arithmetic, TileIndex, true>(split, plan, kernel);
  }
  Matrix const& weight = problem.weight;
  const int64_t down = IsTransposed ? problem.k : problem.n, across = IsTransposed ? problem.n : problem.k;
  const int64_t of_x = split.x.padded_columns * Mainloop::kSlices;
  // What is behind the roots that the kernel finds in the workspace (layout.h): those with which it begins.
  const float* const roots = fp16_slices::first_roots(split.weight.roots, problem.n);
  typename Mainloop::Params mainloop;
  if (!sm90::encode(&mainloop.weight, sm90::kMapType<float>, sizeof(float), weight.data,
                    IsTransposed ? weight.column_stride : weight.row_stride, down, across, Mainloop::kBoxHeight,
                    kBoxRowBytes) ||
      !sm90::encode(&mainloop.x, sm90::kMapType<typename Types::Element>, sizeof(typename Types::Element),
                    split.x.slices, of_x, problem.m, of_x, Mainloop::kColumns, sm90::kStageRowBytes)) {
    return sm90::kNoDescriptor;
  }
  mainloop.long_sum = problem.k >= Mainloop::kLongSum;
  mainloop.is_weight_read_once = problem.m <= Mainloop::kColumns;
  mainloop.rows = {/*data=*/static_cast<const float*>(weight.data),
                   weight.row_stride,
                   weight.column_stride,
                   /*rows=*/static_cast<int>(problem.n),
                   /*columns=*/static_cast<int>(problem.k),
                   roots,
                   /*found_roots=*/split.weight.roots,
                   split.weight.statistics,
                   split.weight.tiny,
                   fp16_slices::statistics_of_groups(split.weight.roots, problem.n),
                   split.remembered_roots};
  return sm90::launch_encoded<Types>(problem, plan, mainloop,
                                     {/*row_roots=*/roots, /*column_roots=*/split.x.roots,
                                      /*found_roots=*/split.weight.roots},
                                     split.x.padded_columns, kernel);
}

template <Arithmetic arithmetic, int... TileIndex, int... AsItLiesIndex>
const char* launch_arithmetic(SplitProblem const& split, Plan const& plan, const void* kernel,
                              std::integer_sequence<int, TileIndex...>, std::integer_sequence<int, AsItLiesIndex...>) {
  constexpr const char* (*launches[])(SplitProblem const&, Plan const&, const void*) = {
      &launch_tile<arithmetic, TileIndex>..., &launch_as_it_lies<arithmetic, AsItLiesIndex, false>...};
  return launches[plan.tile](split, plan, kernel);
}

}  // namespace

const char* launch_gemm(SplitProblem const& split, Plan const& plan, const void* kernel) {
  if (split.problem.arithmetic == Arithmetic::Split) {
    return launch_arithmetic<Arithmetic::Split>(split, plan, kernel, std::make_integer_sequence<int, kSplitTileCount>{},
                                                std::make_integer_sequence<int, kAsItLiesSplitTileCount>{});
  }
  return launch_arithmetic<Arithmetic::Scaled>(split, plan, kernel, std::make_integer_sequence<int, kScaledTileCount>{},
                                               std::make_integer_sequence<int, kAsItLiesScaledTileCount>{});
}

}  // namespace epigemm::sm90_fp16x3
