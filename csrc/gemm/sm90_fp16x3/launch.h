// One fused GEMM on fp16 pieces: its mainloop, and an epilogue tree that first takes the rows' scales back out.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "gemm/sm90/evt.h"
#include "gemm/sm90/run.h"
#include "gemm/sm90_fp16x3/kernels.h"
#include "gemm/sm90_fp16x3/mainloop.h"
#include "gemm/sm90_fp16x3/rescale.h"
#include "gemm/sm90_fp16x3/tiles.h"

namespace epigemm::sm90_fp16x3 {

namespace fusion = cutlass::epilogue::fusion;

// The functor's accumulator, rescaled.
template <class TileShape>
struct RescaledAccumulator {
  using RootsOfA = fusion::Sm90ColBroadcast</*Stages=*/0, TileShape, float, float>;
  using RootsOfB = fusion::Sm90RowBroadcast</*Stages=*/0, TileShape, float, float>;
  using Compute = fusion::Sm90Compute<sm90::Lift<Rescale>::template Compute, float, float,
                                      cutlass::FloatRoundStyle::round_to_nearest>;
  using Type = fusion::Sm90EVT<Compute, RootsOfA, RootsOfB, fusion::Sm90AccFetch>;

  static typename Type::Arguments arguments(SplitMatrix const& a, SplitMatrix const& b) {
    return {
        /*RootsOfA=*/{a.roots, /*null_default=*/0.0f, /*dCol=*/{}},
        /*RootsOfB=*/{b.roots, /*null_default=*/0.0f, /*dRow=*/{}},
        /*Sm90AccFetch=*/{},
        /*Compute=*/{},
    };
  }
};

template <class Functor, Arithmetic arithmetic, int TileIndex>
struct Kernel {
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

  using Accumulator = RescaledAccumulator<TileShape>;
  using Tree = sm90::EpilogueTree<Functor, float, float, TileShape, tile.transposed, Accumulator>;
  // D is row-major; its transpose, column-major.
  using LayoutD = std::conditional_t<tile.transposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int alignment = 16 / sizeof(float);  // what TMA asks of D's rows

  // 16 columns of D a pass instead of CUTLASS's 32: of three stages of four tiles, shared memory leaves 35 KB for the
  // epilogue, and every vector along the columns takes another 1 KB of it.
  using EpilogueTile = std::conditional_t<split && !tile.transposed, cute::Shape<cute::_128, cute::_16>,
                                          cutlass::epilogue::collective::EpilogueTileAuto>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTile,
      /*ElementAccumulator=*/float,
      /*ElementCompute=*/float, /*ElementC=*/void, LayoutD, alignment, /*ElementD=*/float, LayoutD, alignment,
      EpilogueSchedule, typename Tree::Type>::CollectiveOp;
  static constexpr int epilogue_bytes = sizeof(typename CollectiveEpilogue::SharedStorage);

  // What a multiprocessor's shared memory holds besides the epilogue; the kernel's own few barriers left out.
  static constexpr int stage_bytes = kPieces * sizeof(Element) * kTileK * (rows + columns) +
                                     sizeof(typename cutlass::PipelineTmaAsync<1>::SharedStorage);
  static constexpr int stages =
      (cutlass::gemm::collective::detail::sm90_smem_capacity_bytes - epilogue_bytes - 256) / stage_bytes;
  static_assert(!split || stages >= 3, "with fewer stages the loads cannot run ahead");

  using ScaledMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
      /*ElementA=*/Element, cutlass::layout::RowMajor, /*alignment=*/8,
      /*ElementB=*/Element, cutlass::layout::ColumnMajor, /*alignment=*/8,
      /*ElementAccumulator=*/float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<epilogue_bytes>, MainloopSchedule>::CollectiveOp;
  using CollectiveMainloop =
      std::conditional_t<split, Mainloop<TileShape, ClusterShape, stages, /*PrefetchA=*/tile.transposed>,
                         ScaledMainloop>;

  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                          CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static auto stride_of(SplitMatrix const& matrix) {
    return cute::Stride<int64_t, cute::_1, int64_t>{matrix.padded_columns * (split ? kPieces : 1), cute::_1{}, 0};
  }

  static typename GemmKernel::StrideD stride_of_d(Problem const& problem) {
    if constexpr (tile.transposed) {
      return {cute::_1{}, problem.out.row_stride, 0};
    } else {
      return {problem.out.row_stride, cute::_1{}, 0};
    }
  }

  static typename Gemm::Arguments arguments(SplitProblem const& split_problem, Plan const& plan) {
    using RasterOrder = decltype(Gemm::Arguments::scheduler.raster_order);
    Problem const& problem = split_problem.problem;
    SplitMatrix const& a = tile.transposed ? split_problem.weight : split_problem.x;
    SplitMatrix const& b = tile.transposed ? split_problem.x : split_problem.weight;
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        /*problem_shape=*/
        {static_cast<int>(a.rows), static_cast<int>(b.rows), static_cast<int>(a.padded_columns), /*batch=*/1},
        /*mainloop=*/
        {
            static_cast<Element const*>(a.pieces),
            /*dA=*/stride_of(a),
            static_cast<Element const*>(b.pieces),
            /*dB=*/stride_of(b),
        },
        /*epilogue=*/
        {
            /*thread=*/Tree::arguments(problem.operands, Accumulator::arguments(a, b)),
            /*ptr_C=*/nullptr,
            /*dC=*/{},
            static_cast<float*>(problem.out.data),
            /*dD=*/stride_of_d(problem),
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

  // The kernel ahead is the split of x, and it started when everything before it was done: operands that the epilogue
  // reads before it waits are there.
  static const char* launch(SplitProblem const& problem, Plan const& plan) {
    return sm90::run<Gemm>(arguments(problem, plan), problem.problem.stream, /*dependent=*/true);
  }
};

template <class Functor, Arithmetic arithmetic, int... TileIndex>
const char* launch_tile(SplitProblem const& problem, Plan const& plan, std::integer_sequence<int, TileIndex...>) {
  constexpr const char* (*launches[])(SplitProblem const&,
                                      Plan const&) = {&Kernel<Functor, arithmetic, TileIndex>::launch...};
  return launches[plan.tile](problem, plan);
}

template <class Functor, Arithmetic arithmetic>
const char* launch(SplitProblem const& problem, Plan const& plan) {
  return launch_tile<Functor, arithmetic>(problem, plan, std::make_integer_sequence<int, tile_count(arithmetic)>{});
}

}  // namespace epigemm::sm90_fp16x3
