// One fused GEMM on Hopper: CUTLASS's TMA warp-specialised mainloop and an epilogue tree made from the functor.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "gemm/launch.h"
#include "gemm/sm90/evt.h"
#include "gemm/sm90/run.h"
#include "gemm/sm90_tma/tiles.h"

namespace epigemm::sm90_tma {

// The element types of a unit. TF32 reads fp32 memory as it is; the tensor cores ignore the low 13 mantissa bits.
namespace element {
using float16 = cutlass::half_t;
using bfloat16 = cutlass::bfloat16_t;
using tf32 = float;
}  // namespace element

template <class Functor, class Element, int TileIndex>
struct Kernel {
  static constexpr Tile tile = kTiles[TileIndex];
  static constexpr bool cooperative = tile.schedule == Schedule::Cooperative;
  static constexpr int alignment = 16 / sizeof(Element);  // what TMA asks of pointers and row strides

  using TileShape =
      cute::Shape<cute::Int<tile.m>, cute::Int<tile.n>, cute::Int<kTileKBytes / static_cast<int>(sizeof(Element))>>;
  using ClusterShape = cute::Shape<cute::Int<tile.cluster_m>, cute::Int<tile.cluster_n>, cute::_1>;
  using MainloopSchedule = std::conditional_t<cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                              cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule = std::conditional_t<cooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                              cutlass::epilogue::TmaWarpSpecialized>;

  // What one pass of the epilogue covers of a warpgroup's (cooperative: both warpgroups') rows. 64 columns of 16-bit
  // results instead of CUTLASS's 32 halve the passes and their barriers: up to 1% on an H200 where K is 4096. Passes of
  // fp32 results are as many bytes already with CUTLASS's choice.
  using EpilogueTile =
      std::conditional_t<sizeof(Element) == 2, cute::Shape<cute::Int<cooperative ? 128 : 64>, cute::_64>,
                         cutlass::epilogue::collective::EpilogueTileAuto>;

  using Tree = sm90::EpilogueTree<Functor, Element, Element, TileShape>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTile,
      /*ElementAccumulator=*/float, /*ElementCompute=*/float,
      /*ElementC=*/void, cutlass::layout::RowMajor, alignment,
      /*ElementD=*/Element, cutlass::layout::RowMajor, alignment, EpilogueSchedule, typename Tree::Type>::CollectiveOp;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
      /*ElementA=*/Element, cutlass::layout::RowMajor, alignment,
      /*ElementB=*/Element, cutlass::layout::ColumnMajor, alignment,
      /*ElementAccumulator=*/float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                          CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static typename Gemm::Arguments arguments(Problem const& problem, Plan const& plan) {
    using RasterOrder = decltype(Gemm::Arguments::scheduler.raster_order);
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        /*problem_shape=*/
        {static_cast<int>(problem.m), static_cast<int>(problem.n), static_cast<int>(problem.k), /*batch=*/1},
        /*mainloop=*/
        {
            static_cast<Element const*>(problem.x.data),
            /*dA=*/{problem.x.row_stride, cute::_1{}, 0},
            static_cast<Element const*>(problem.weight.data),
            /*dB=*/{problem.weight.row_stride, cute::_1{}, 0},
        },
        /*epilogue=*/
        {
            /*thread=*/Tree::arguments(problem.operands),
            /*ptr_C=*/nullptr,
            /*dC=*/{},
            static_cast<Element*>(problem.out.data),
            /*dD=*/{problem.out.row_stride, cute::_1{}, 0},
        },
    };
    arguments.hw_info.device_id = problem.device.index;
    arguments.hw_info.sm_count = problem.device.multiprocessors;
    arguments.scheduler.max_swizzle_size = plan.swizzle;
    arguments.scheduler.raster_order = plan.raster == Raster::AlongM ? RasterOrder::AlongM : RasterOrder::AlongN;
    return arguments;
  }

  // The epilogue's scalar node reads a scalar on the device when the kernel starts, before it waits for the kernel
  // ahead.
  static bool reads_scalar_early(Problem const& problem) {
    for (std::size_t i = 1; i < Functor::operands.size(); ++i) {
      if (Functor::operands[i].kind == OperandKind::Scalar && problem.operands[i - 1].data) return true;
    }
    return false;
  }

  static const char* launch(Problem const& problem, Plan const& plan) {
    // Behind BatchNorm's fold (N threads) the GEMM's set-up overlaps with the kernel ahead.
    return sm90::run<Gemm>(arguments(problem, plan), problem.stream, /*dependent=*/!reads_scalar_early(problem));
  }
};

template <class Functor, class Element, int... TileIndex>
const char* launch_tile(Problem const& problem, Plan const& plan, std::integer_sequence<int, TileIndex...>) {
  constexpr Launch launches[] = {&Kernel<Functor, Element, TileIndex>::launch...};
  return launches[plan.tile](problem, plan);
}

template <class Functor, class Element>
const char* launch(Problem const& problem, Plan const& plan) {
  return launch_tile<Functor, Element>(problem, plan, std::make_integer_sequence<int, kTileCount>{});
}

}  // namespace epigemm::sm90_tma
