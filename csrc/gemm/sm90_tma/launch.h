// One fused GEMM on Hopper: CUTLASS's TMA warp-specialised mainloop and an epilogue tree made from the functor.
#pragma once

#include "gemm/launch.h"
#include "gemm/sm90/evt.h"
#include "gemm/sm90/run.h"
#include "gemm/sm90_tma/parts.h"

namespace epigemm::sm90_tma {

template <class Functor, class Element, int TileIndex>
struct Kernel {
  using Types = Parts<Element, TileIndex>;
  using Tree = sm90::EpilogueTree<Functor, Element, Element, typename Types::TileShape>;

  using CollectiveEpilogue =
      typename Types::template Epilogue<typename Tree::Type, /*ElementC=*/void, typename Types::EpilogueTile>;
  using CollectiveMainloop =
      typename Types::template Mainloop<cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>>;
  using GemmKernel = typename Types::template GemmKernel<CollectiveMainloop, CollectiveEpilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static typename Gemm::Arguments arguments(Problem const& problem, Plan const& plan) {
    auto arguments = Types::template arguments<typename Gemm::Arguments>(problem, plan);
    arguments.epilogue.thread = Tree::arguments(problem.operands);
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
