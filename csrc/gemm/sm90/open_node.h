// The epilogue of an open kernel: one CUTLASS epilogue visitor for every kind of operand. Which of them are read is
// decided when a functor is linked in (csrc/open/contract.h); the code of the others is gone then.
//
// A vector along the kernel's columns waits in shared memory, as far as there is room; one along its rows is in the
// registers of the threads that own the rows. A kernel that computes the transpose of D has D's columns along its rows:
// then the two kinds of vectors change places.
#pragma once

#include "gemm/sm90/architecture.h"
#include "gemm/sm90/open_callbacks.h"

namespace epigemm::sm90 {

// What the functor's accumulator is: here the mainloop's sums as they are.
struct PlainSums {
  static constexpr bool has_roots = false;

  CUTLASS_DEVICE static float apply(float, float, float sum) { return sum; }
};

// Operand: the element type of the operands that follow x's. Roots: what becomes of a sum (PlainSums), from one factor
// along the kernel's rows and one along its columns. SharedBytes: for vectors along the kernel's columns.
template <class Operand_, class Output_, class TileShape_, class Sums_, bool MatrixByTma_, bool Transposed_,
          int SharedBytes_>
struct OpenNodeTraits {
  using Operand = Operand_;
  using Output = Output_;
  using TileShape = TileShape_;
  using Sums = Sums_;
  static constexpr bool kMatrixByTma = MatrixByTma_;
  static constexpr bool kTransposed = Transposed_;
  static constexpr int kSharedBytes = SharedBytes_;
};

// Which elements of a tile are a thread's.
template <bool ReferenceSrc, class TileShape, class EpilogueTile, class TiledCopy>
struct OpenPartition {
  static constexpr int kThreads = decltype(cute::size(TiledCopy{}))::value;
  using Tile = decltype(cute::take<0, 2>(TileShape{}));

  template <class Iterator, class Stride>
  CUTLASS_DEVICE static auto partition(Iterator iterator, Stride stride, int thread) {
    return fusion::sm90_partition_for_epilogue<ReferenceSrc>(
        cute::make_tensor(iterator, cute::make_layout(Tile{}, stride)), EpilogueTile{}, TiledCopy{}, thread);
  }

  CUTLASS_DEVICE static auto rows(int thread) {
    return partition(cute::counting_iterator<int>(0), cute::Stride<cute::_1, cute::_0>{}, thread);
  }

  CUTLASS_DEVICE static auto columns(int thread) {
    return partition(cute::counting_iterator<int>(0), cute::Stride<cute::_0, cute::_1>{}, thread);
  }

  // A vector along the tile's columns, in shared memory.
  template <class T>
  CUTLASS_DEVICE static auto staged(const T* vector, int thread) {
    return partition(cute::make_smem_ptr(vector), cute::Stride<cute::_0, cute::_1>{}, thread);
  }
};

// What a multiprocessor's shared memory leaves for vectors beside the stages and the passes of C and D, up to what all
// of them take in fp32. Epilogue: the collective, whatever its node has room for.
template <class Epilogue, class Node>
constexpr int open_vector_bytes(int bytes_of_stages) {
  constexpr int kBarriers = 1024, kAlignment = 128;
  using Passes = decltype(Epilogue::TensorStorage::collective);
  const int left = Sm90::kSharedBytes - kBarriers - bytes_of_stages - static_cast<int>(sizeof(Passes));
  return left < 0 ? 0 : left < Node::kMostVectorBytes ? left / kAlignment * kAlignment : Node::kMostVectorBytes;
}

template <class Traits>
struct OpenNode {
  static constexpr int kMostVectorBytes = OpenVectors<Traits, /*AlongRows=*/false>::kCount *
                                          cute::size<1>(typename Traits::TileShape{}) * static_cast<int>(sizeof(float));

  struct SharedStorage {
    alignas(16) char vectors[Traits::kSharedBytes > 0 ? Traits::kSharedBytes : 16];
  };
  using Arguments = OpenArguments;
  using Params = OpenArguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& arguments, void*) {
    return arguments;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE OpenNode() {}
  CUTLASS_HOST_DEVICE OpenNode(Params const& params, SharedStorage const& shared)
      : params(&params), vectors(const_cast<char*>(shared.vectors)) {}

  const Params* params = nullptr;
  char* vectors = nullptr;

  CUTLASS_DEVICE bool is_C_load_needed() const {
    if constexpr (Traits::kMatrixByTma) {
      return epigemm_operand(open::kMatrix0) != open::kUnread;
    } else {
      return false;
    }
  }

  CUTLASS_DEVICE bool is_producer_load_needed() const { return is_C_load_needed(); }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    using Partition =
        OpenPartition<ReferenceSrc, typename Traits::TileShape, cute::remove_cvref_t<decltype(args.epi_tile)>,
                      cute::remove_cvref_t<decltype(args.tiled_copy)>>;
    using FragmentC = cute::remove_cvref_t<decltype(args.tCrC)>;
    return OpenCallbacks<Traits, Partition, FragmentC>(*params, args.tCrC, vectors, args.problem_shape_mnkl,
                                                       args.tile_coord_mnkl, args.thread_idx);
  }
};

}  // namespace epigemm::sm90
