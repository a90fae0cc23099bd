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

// The weight, or the groups' weights, as they lie. False if the driver refuses.
template <bool IsTransposed, bool IsGrouped>
bool encode_weight(CUtensorMap* map, Problem const& problem, int box_rows) {
  Matrix const& weight = problem.weight;
  const int64_t down = IsTransposed ? problem.k : problem.n, across = IsTransposed ? problem.n : problem.k;
  const int64_t stride = IsTransposed ? weight.column_stride : weight.row_stride;
  constexpr auto kType = sm90::kMapType<float>;
  constexpr int kBytes = sizeof(float);
  if constexpr (IsGrouped) {
    const int64_t count = problem.groups.count, apart = count > 1 ? problem.groups.weight_stride : down * stride;
    return sm90::encode_several(map, kType, kBytes, weight.data, stride, down, across, apart, count, box_rows);
  } else {
    return sm90::encode(map, kType, kBytes, weight.data, stride, down, across, box_rows, kBoxRowBytes);
  }
}

// The weight as it lies: `split.weight` has no slices, and its roots and statistics are written by the kernel.
template <Arithmetic arithmetic, int TileIndex, bool IsTransposed, bool IsGrouped>
const char* launch_as_it_lies(SplitProblem const& split, Plan const& plan, const void* kernel) {
  using Types = AsItLies<arithmetic, TileIndex, IsTransposed, IsGrouped>;
  using Mainloop = typename sm90::Kernel<Types>::Mainloop;
  Problem const& problem = split.problem;
  if constexpr (!IsGrouped && index_in_groups(arithmetic, TileIndex) >= 0) {
    if (problem.groups) {
      return launch_as_it_lies<arithmetic, TileIndex, IsTransposed, true>(split, plan, kernel);
    }
  }
  if constexpr (!IsTransposed) {
    if (problem.is_weight_transposed) {
      return launch_as_it_lies<arithmetic, TileIndex, true, IsGrouped>(split, plan, kernel);
    }
  }
  Matrix const& weight = problem.weight;
  const int64_t of_x = split.x.padded_columns * Mainloop::kSlices;
  // What is behind the roots that the kernel finds in the workspace (layout.h): those with which it begins.
  const float* const roots = fp16_slices::first_roots(split.weight.roots, split.weight.rows);
  typename Mainloop::Params mainloop;
  if (!encode_weight<IsTransposed, IsGrouped>(&mainloop.weight, problem, Mainloop::kBoxHeight) ||
      !sm90::encode(&mainloop.x, sm90::kMapType<typename Types::Element>, sizeof(typename Types::Element),
                    split.x.slices, of_x, problem.m, of_x, Mainloop::kColumns, sm90::kStageRowBytes)) {
    return sm90::kNoDescriptor;
  }
  mainloop.long_sum = problem.k >= Mainloop::kLongSum;
  mainloop.is_weight_read_once = problem.m <= Mainloop::kColumns * fp16_slices::weights_of(problem);
  static_cast<WeightRows&>(mainloop.rows) = {/*data=*/static_cast<const float*>(weight.data),
                                             weight.row_stride,
                                             weight.column_stride,
                                             /*rows=*/static_cast<int>(problem.n),
                                             /*columns=*/static_cast<int>(problem.k),
                                             roots,
                                             /*found_roots=*/split.weight.roots,
                                             split.weight.statistics,
                                             split.weight.tiny,
                                             fp16_slices::statistics_of_groups(split.weight.roots, split.weight.rows),
                                             split.remembered_roots};
  if constexpr (IsGrouped) {
    mainloop.rows.apart = problem.groups.weight_stride;
    mainloop.rows.all_looks = split.remembered_roots ? split.remembered_roots + split.weight.rows : nullptr;
  }
  return sm90::launch_encoded<Types>(problem, plan, mainloop,
                                     {/*row_roots=*/roots, /*column_roots=*/split.x.roots,
                                      /*found_roots=*/split.weight.roots},
                                     split.x.padded_columns, kernel);
}

template <Arithmetic arithmetic, int... TileIndex, int... AsItLiesIndex>
const char* launch_arithmetic(SplitProblem const& split, Plan const& plan, const void* kernel,
                              std::integer_sequence<int, TileIndex...>, std::integer_sequence<int, AsItLiesIndex...>) {
  constexpr const char* (*launches[])(SplitProblem const&, Plan const&, const void*) = {
      &launch_tile<arithmetic, TileIndex>..., &launch_as_it_lies<arithmetic, AsItLiesIndex, false, false>...};
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
