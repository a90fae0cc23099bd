// The mainloop of two products with the same x: CUTLASS's, but for what is loaded. Half of a stage's columns are rows
// of one weight, the others rows of a second one, from the same row on. So a thread that has a sum of the first product
// has the second one's of the same row and column, half a tile of columns behind it (EpilogueConfig::kGates).
//
// The CTAs of a cluster share the tiles of both weights: each loads one of them, for itself and for the other.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "gemm/sm90/kernel.cuh"

namespace epigemm::sm90 {

// Base: CUTLASS's collective for tiles with the columns of both halves.
template <class Base>
struct PairMainloop : Base {
  using Element = typename Base::ElementA;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using Pipeline = typename Base::MainloopPipeline;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;

  static constexpr int kRows = cute::get<0>(typename Base::TileShape{});
  static constexpr int kColumns = cute::get<1>(typename Base::TileShape{}) / 2;    // of a weight's half
  static constexpr int kStageElements = cute::get<2>(typename Base::TileShape{});  // of K, a row's 128 bytes
  static constexpr int kCtas = cute::size(ClusterShape{});
  static_assert(kCtas <= 2 && cute::size<1>(ClusterShape{}) == 1, "a CTA loads one of two weights, or both");
  static_assert(std::is_same_v<typename Base::SmemLayoutAtomA, cute::GMMA::Layout_K_SW128_Atom<Element>> &&
                    std::is_same_v<typename Base::SmemLayoutAtomB, cute::GMMA::Layout_K_SW128_Atom<Element>>,
                "rows are not swizzled as TMA does");
  static_assert(typename Base::SmemLayoutA{}(0, 0, 1) == kRows * kStageElements &&
                    typename Base::SmemLayoutB{}(kColumns, 0, 1) == 3 * kColumns * kStageElements,
                "stages and halves are not rows one behind the other");

  struct Params {
    CUtensorMap x, weights[2];
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    for (CUtensorMap const* map : {&params.x, &params.weights[0], &params.weights[1]}) {
      cute::prefetch_tma_descriptor(map);
    }
  }

  // Returns nothing: there are no tensors along K, and `load` counts its stages itself.
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const&, Params const&) const {
    return cute::make_tuple(cute::make_shape(0, 0, 0, 0));
  }

  // The producer: one thread keeps the stages filled.
  template <class Inputs, class TileIndex, class StageIterator>
  CUTLASS_DEVICE void load(Params const& params, Pipeline pipeline, PipelineState write, Inputs const&,
                           TileIndex const& tile, StageIterator, int stages, int, uint32_t rank,
                           TensorStorage& shared) const {
    if (!cute::elect_one_sync()) return;
    const int row = cute::get<0>(tile) * kRows, column = cute::get<1>(tile) * kColumns;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < stages; ++stage, ++write) {
      pipeline.producer_acquire(write);
      auto* const barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(write));
      auto* const x = shared.smem_A.data() + write.index() * kRows * kStageElements;
      auto* const columns = shared.smem_B.data() + write.index() * 2 * kColumns * kStageElements;
      const int k = stage * kStageElements;
      cute::SM90_TMA_LOAD_2D::copy(&params.x, barrier, kCached, x, k, row);
      if constexpr (kCtas == 2) {
        constexpr uint16_t kBoth = 3;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.weights[rank], barrier, kBoth, kCached,
                                               columns + rank * kColumns * kStageElements, k, column);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(&params.weights[0], barrier, kCached, columns, k, column);
        cute::SM90_TMA_LOAD_2D::copy(&params.weights[1], barrier, kCached, columns + kColumns * kStageElements, k,
                                     column);
      }
    }
  }

  template <class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, PipelineState read, Sums& sums, int stages, int thread,
                          TensorStorage& shared, Params const&) {
    Base::mma(pipeline, read, sums, stages, thread, shared, typename Base::Params{});  // of which it reads none
  }

 private:
  static constexpr auto kCached = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
};

// Types for two products of x. The second product is the functor's first matrix.
template <class Element, int Stages, Schedule schedule>
struct TwoProducts : OneProduct<Element, Stages, schedule> {
  static constexpr int kWeights = 2;

  template <class TileShape, class ClusterShape>
  using Mainloop =
      PairMainloop<typename OneProduct<Element, Stages, schedule>::template Mainloop<TileShape, ClusterShape>>;
};

}  // namespace epigemm::sm90
