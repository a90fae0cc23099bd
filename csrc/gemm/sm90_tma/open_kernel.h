// One fused GEMM on Hopper: CUTLASS's TMA warp-specialised mainloop and an open epilogue.
#pragma once

#include "gemm/operands.h"
#include "gemm/sm90/open_node.h"
#include "gemm/sm90_tma/parts.h"

namespace epigemm::sm90_tma {

// MatrixByTma: the first matrix comes by TMA, as CUTLASS's C.
template <class Element, int TileIndex, bool MatrixByTma>
struct OpenKernel {
  using Types = Parts<Element, TileIndex>;
  using TileShape = typename Types::TileShape;

  // Vectors get what shared memory the stages leave.
  using CollectiveMainloop =
      typename Types::template Mainloop<cutlass::gemm::collective::StageCount<Types::tile.stages>>;

  template <int SharedBytes>
  using Node = sm90::OpenNode<sm90::OpenNodeTraits<Element, Element, TileShape, sm90::PlainSums, MatrixByTma,
                                                   /*Transposed=*/false, SharedBytes>>;
  template <int SharedBytes>
  using Epilogue = typename Types::template Epilogue<Node<SharedBytes>, MatrixByTma>;

  static constexpr int vector_bytes =
      sm90::open_vector_bytes<Epilogue<0>, Node<0>>(sizeof(typename CollectiveMainloop::SharedStorage::TensorStorage));
  using CollectiveEpilogue = Epilogue<vector_bytes>;
  using GemmKernel = typename Types::template GemmKernel<CollectiveMainloop, CollectiveEpilogue>;
  static_assert(GemmKernel::SharedStorageSize <= Sm90::kSharedBytes, "a stage too many");
  static_assert(vector_bytes >= 2048, "no room for columns");

  static auto arguments(Problem const& problem, Plan const& plan) {
    auto arguments = Types::template arguments<typename GemmKernel::Arguments>(problem, plan);
    arguments.epilogue.thread = {/*operands=*/operands_of(problem)};
    if constexpr (MatrixByTma) {
      open::Operands<float> const& operands = arguments.epilogue.thread.operands;
      arguments.epilogue.ptr_C = static_cast<Element const*>(operands.data[open::kMatrix0]);
      arguments.epilogue.dC = {operands.matrix_strides[0], cute::_1{}, 0};
    }
    return arguments;
  }
};

}  // namespace epigemm::sm90_tma
