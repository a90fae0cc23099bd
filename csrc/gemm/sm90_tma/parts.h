// What Hopper's large tiles are made of, closed and open: CUTLASS's TMA warp-specialised kernels around an epilogue.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "gemm/problem.h"
#include "gemm/sm90_tma/tiles.h"

namespace epigemm::sm90_tma {

// The element types of a unit. TF32 reads fp32 memory as it is; the tensor cores ignore the low 13 mantissa bits.
namespace element {
using float16 = cutlass::half_t;
using bfloat16 = cutlass::bfloat16_t;
using tf32 = float;
}  // namespace element

// What a tile's kernels are made of, whatever their epilogue.
template <class Element, int TileIndex>
struct Parts {
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
  using HalfEpilogueTile =
      cute::Shape<cute::Int<cooperative ? 128 : 64>, cute::Int<64 / static_cast<int>(sizeof(Element))>>;

  // Fusion: the epilogue's visitor tree. ElementC: of a matrix that comes by TMA, or void.
  template <class Fusion, class ElementC, class PassTile>
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, PassTile,
      /*ElementAccumulator=*/float, /*ElementCompute=*/float, ElementC, cutlass::layout::RowMajor, alignment,
      /*ElementD=*/Element, cutlass::layout::RowMajor, alignment, EpilogueSchedule, Fusion>::CollectiveOp;

  template <class StageCount>
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
      /*ElementA=*/Element, cutlass::layout::RowMajor, alignment,
      /*ElementB=*/Element, cutlass::layout::ColumnMajor, alignment,
      /*ElementAccumulator=*/float, TileShape, ClusterShape, StageCount, MainloopSchedule>::CollectiveOp;

  template <class CollectiveMainloop, class CollectiveEpilogue>
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                          CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;

  // Without what the epilogue reads: `epilogue.thread`, and C where there is one.
  template <class Arguments>
  static Arguments arguments(Problem const& problem, Plan const& plan) {
    using RasterOrder = decltype(Arguments::scheduler.raster_order);
    Arguments arguments{
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
            /*thread=*/{},
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
};

}  // namespace epigemm::sm90_tma
