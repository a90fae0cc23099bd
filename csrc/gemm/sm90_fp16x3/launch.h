// One fused GEMM on fp16 pieces: its mainloop, and an epilogue tree that first takes the rows' scales back out.
#pragma once

#include "gemm/sm90/evt.h"
#include "gemm/sm90/run.h"
#include "gemm/sm90_fp16x3/parts.h"
#include "gemm/sm90_fp16x3/rescale.h"

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
  using Types = Parts<arithmetic, TileIndex>;
  using TileShape = typename Types::TileShape;
  using Accumulator = RescaledAccumulator<TileShape>;
  using Tree = sm90::EpilogueTree<Functor, float, float, TileShape, Types::tile.transposed, Accumulator>;

  using CollectiveEpilogue = typename Types::template Epilogue<typename Tree::Type>;
  static constexpr int epilogue_bytes = sizeof(typename CollectiveEpilogue::SharedStorage);

  // What a multiprocessor's shared memory holds besides the epilogue; the kernel's own few barriers left out.
  static constexpr int split_stages =
      (cutlass::gemm::collective::detail::sm90_smem_capacity_bytes - epilogue_bytes - 256) / Types::stage_bytes;
  static_assert(!Types::split || split_stages >= 3, "with fewer stages the loads cannot run ahead");
  using CollectiveMainloop =
      typename Types::template Mainloop<split_stages,
                                        cutlass::gemm::collective::StageCountAutoCarveout<epilogue_bytes>>;

  using GemmKernel = typename Types::template GemmKernel<CollectiveMainloop, CollectiveEpilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static typename Gemm::Arguments arguments(SplitProblem const& problem, Plan const& plan) {
    auto arguments = Types::template arguments<typename Gemm::Arguments, typename GemmKernel::StrideD>(problem, plan);
    arguments.epilogue.thread =
        Tree::arguments(problem.problem.operands, Accumulator::arguments(Types::a_of(problem), Types::b_of(problem)));
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
