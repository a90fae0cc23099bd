// The kernels on fp16 slices with an open epilogue, which gets the true product.
#pragma once

#include "gemm/operands.h"
#include "gemm/sm90/open_node.h"
#include "gemm/sm90_fp16x3/parts.h"
#include "gemm/sm90_fp16x3/rescale.h"

namespace epigemm::sm90_fp16x3 {

// The rows' scales taken back out.
struct RescaledSums {
  static constexpr bool has_roots = true;

  CUTLASS_DEVICE static float apply(float root_a, float root_b, float sum) { return rescale(root_a, root_b, sum); }
};

template <Arithmetic arithmetic, int TileIndex>
struct OpenKernel {
  using Types = Parts<arithmetic, TileIndex>;
  using TileShape = typename Types::TileShape;

  // Vectors get what shared memory the stages leave.
  static_assert(!Types::split || Types::tile.stages >= 3, "with fewer stages the loads cannot run ahead");
  using CollectiveMainloop = typename Types::Mainloop;

  template <int SharedBytes>
  using Node = sm90::OpenNode<sm90::OpenNodeTraits<float, float, TileShape, RescaledSums, /*MatrixByTma=*/false,
                                                   Types::tile.transposed, SharedBytes>>;
  template <int SharedBytes>
  using Epilogue = typename Types::template Epilogue<Node<SharedBytes>>;

  static constexpr int vector_bytes =
      sm90::open_vector_bytes<Epilogue<0>, Node<0>>(sizeof(typename CollectiveMainloop::SharedStorage::TensorStorage));
  using CollectiveEpilogue = Epilogue<vector_bytes>;
  using GemmKernel = typename Types::template GemmKernel<CollectiveMainloop, CollectiveEpilogue>;
  static_assert(GemmKernel::SharedStorageSize <= Sm90::kSharedBytes, "a stage too many");
  static_assert(vector_bytes >= 2 * cute::size<1>(TileShape{}) * int(sizeof(float)), "no room for roots and a vector");

  static auto arguments(SplitProblem const& problem, Plan const& plan) {
    using Arguments = typename GemmKernel::Arguments;
    auto arguments = Types::template arguments<Arguments, typename GemmKernel::StrideD>(problem, plan);
    arguments.epilogue.thread = {
        /*operands=*/operands_of(problem.problem),
        /*row_roots=*/Types::a_of(problem).roots,
        /*column_roots=*/Types::b_of(problem).roots,
    };
    return arguments;
  }
};

}  // namespace epigemm::sm90_fp16x3
