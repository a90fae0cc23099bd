// The types of Hopper's large tiles: CUTLASS's TMA warp-specialised kernels around an epilogue.
#pragma once

#include <algorithm>
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

// The types of a tile's kernels that do not depend on the epilogue.
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

  // What one pass of the epilogue covers: of a warpgroup's (cooperative: both warpgroups') rows 128 bytes of the
  // result. In 16 bits CUTLASS would take half: twice the passes and their barriers, up to 1% on an H200 where K is
  // 4096. With a matrix by TMA half as many columns, or the first one would wait for more of it.
  static constexpr int pass_rows = cooperative ? 128 : 64;

  // Beside 192 accumulators a thread has few registers for the operands of a wide pass. Narrow ones cost little where
  // the epilogue is hidden; a tile whose whole result has room is for where it is not.
  static constexpr int results = tile.m * tile.n;
  static constexpr bool is_narrow = !cooperative && results > 128 * 128 && 2 * results > tile.result_kib * 1024;

  template <bool MatrixByTma>
  static constexpr int pass_columns =
      (MatrixByTma || (is_narrow && sizeof(Element) == 2) ? 64 : 128) / static_cast<int>(sizeof(Element));

  // CUTLASS has room for two passes of D, or for four of C, into which it puts D.
  template <bool MatrixByTma>
  struct Passes {
    static constexpr int elements = pass_rows * pass_columns<MatrixByTma>;
    static constexpr int count = results / elements;
    static constexpr int with_room =
        std::min(count, tile.result_kib * 1024 / (elements * static_cast<int>(sizeof(Element))));
    static constexpr int of_c = MatrixByTma ? with_room : std::min(count, 4);
    static constexpr int of_d = MatrixByTma ? with_room / 2 : with_room;

    using Shape = cute::Shape<cute::Int<pass_rows>, cute::Int<pass_columns<MatrixByTma>>>;
    using Policy = cutlass::epilogue::Sm90TmaWarpSpecialized<of_c, of_d, elements / (cooperative ? 256 : 128),
                                                             /*ReuseSmemC=*/MatrixByTma,
                                                             /*DelayTmaStore=*/!MatrixByTma>;
  };

  // Node: the epilogue's visitor. CUTLASS's builder has no parameter for the number of passes in shared memory. The
  // collective that it builds has one, so it is named here.
  template <class Node, bool MatrixByTma>
  using Epilogue = typename cutlass::epilogue::collective::detail::Sm90TmaBuilderImpl<
      TileShape, typename Passes<MatrixByTma>::Shape, /*ElementAccumulator=*/float, /*ElementCompute=*/float,
      /*ElementC=*/std::conditional_t<MatrixByTma, Element, void>, cutlass::layout::RowMajor, alignment,
      /*ElementD=*/Element, cutlass::layout::RowMajor, alignment, Node,
      typename Passes<MatrixByTma>::Policy>::CollectiveOp;

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
