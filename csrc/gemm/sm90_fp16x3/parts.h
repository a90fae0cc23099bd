// The types of the kernels on fp16 slices: their mainloops around an epilogue.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "gemm/sm90_fp16x3/kernels.h"
#include "gemm/sm90_fp16x3/mainloop.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

template <Arithmetic arithmetic, int TileIndex>
struct Parts {
  static constexpr Tile tile = tile_of(arithmetic, TileIndex);
  static constexpr bool split = arithmetic == Arithmetic::Split;
  static constexpr bool cooperative = tile.schedule == Schedule::Cooperative;
  static_assert(split ? cooperative : !tile.transposed, "no such mainloop");

  using Element = cutlass::half_t;
  // The kernel's own rows and columns.
  static constexpr int rows = tile.transposed ? tile.n : tile.m;
  static constexpr int columns = tile.transposed ? tile.m : tile.n;
  using TileShape = cute::Shape<cute::Int<rows>, cute::Int<columns>, cute::Int<kTileK>>;
  using ClusterShape = cute::Shape<cute::Int<tile.transposed ? tile.cluster_n : tile.cluster_m>,
                                   cute::Int<tile.transposed ? tile.cluster_m : tile.cluster_n>, cute::_1>;
  using MainloopSchedule = std::conditional_t<cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                              cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule = std::conditional_t<cooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                              cutlass::epilogue::TmaWarpSpecialized>;

  // D is row-major; its transpose, column-major.
  using LayoutD = std::conditional_t<tile.transposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int alignment = 16 / sizeof(float);  // what TMA asks of D's rows

  // 16 columns of D a pass instead of CUTLASS's 32: of three stages of four tiles, shared memory leaves 35 KB for the
  // epilogue, and every vector along the columns takes another 1 KB of it.
  using EpilogueTile = std::conditional_t<split && !tile.transposed, cute::Shape<cute::_128, cute::_16>,
                                          cutlass::epilogue::collective::EpilogueTileAuto>;

  // Fusion: the epilogue's visitor tree.
  template <class Fusion>
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTile,
      /*ElementAccumulator=*/float,
      /*ElementCompute=*/float, /*ElementC=*/void, LayoutD, alignment, /*ElementD=*/float, LayoutD, alignment,
      EpilogueSchedule, Fusion>::CollectiveOp;

  using ScaledMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
      /*ElementA=*/Element, cutlass::layout::RowMajor, /*alignment=*/8,
      /*ElementB=*/Element, cutlass::layout::ColumnMajor, /*alignment=*/8,
      /*ElementAccumulator=*/float, TileShape, ClusterShape, cutlass::gemm::collective::StageCount<tile.stages>,
      MainloopSchedule>::CollectiveOp;
  using Mainloop =
      std::conditional_t<split,
                         sm90_fp16x3::Mainloop<TileShape, ClusterShape, tile.stages, /*PrefetchA=*/tile.transposed>,
                         ScaledMainloop>;

  template <class CollectiveMainloop, class CollectiveEpilogue>
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                          CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;

  static auto stride_of(SplitMatrix const& matrix) {
    return cute::Stride<int64_t, cute::_1, int64_t>{matrix.padded_columns * (split ? kSlices : 1), cute::_1{}, 0};
  }

  // D's stride, or that of its transpose.
  template <class Stride>
  static Stride stride_of_d(Problem const& problem) {
    if constexpr (tile.transposed) {
      return {cute::_1{}, problem.out.row_stride, 0};
    } else {
      return {problem.out.row_stride, cute::_1{}, 0};
    }
  }

  // The kernel's A and B.
  static SplitMatrix const& a_of(SplitProblem const& problem) { return tile.transposed ? problem.weight : problem.x; }
  static SplitMatrix const& b_of(SplitProblem const& problem) { return tile.transposed ? problem.x : problem.weight; }

  // Without what the epilogue reads: `epilogue.thread`.
  template <class Arguments, class StrideD>
  static Arguments arguments(SplitProblem const& split_problem, Plan const& plan) {
    using RasterOrder = decltype(Arguments::scheduler.raster_order);
    Problem const& problem = split_problem.problem;
    SplitMatrix const& a = a_of(split_problem);
    SplitMatrix const& b = b_of(split_problem);
    Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        /*problem_shape=*/
        {static_cast<int>(a.rows), static_cast<int>(b.rows), static_cast<int>(a.padded_columns), /*batch=*/1},
        /*mainloop=*/
        {
            static_cast<Element const*>(a.slices),
            /*dA=*/stride_of(a),
            static_cast<Element const*>(b.slices),
            /*dB=*/stride_of(b),
        },
        /*epilogue=*/
        {
            /*thread=*/{},
            /*ptr_C=*/nullptr,
            /*dC=*/{},
            static_cast<float*>(problem.out.data),
            /*dD=*/stride_of_d<StrideD>(problem),
        },
    };
    arguments.hw_info.device_id = problem.device.index;
    arguments.hw_info.sm_count = problem.device.multiprocessors;
    arguments.scheduler.max_swizzle_size = plan.swizzle;
    // The plan speaks of D's axes.
    bool const along_m = (plan.raster == Raster::AlongM) != tile.transposed;
    arguments.scheduler.raster_order = along_m ? RasterOrder::AlongM : RasterOrder::AlongN;
    return arguments;
  }
};

}  // namespace epigemm::sm90_fp16x3
