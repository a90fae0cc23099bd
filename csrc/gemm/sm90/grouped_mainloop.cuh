// The mainloop of products whose rows of x are in groups (groups.cuh): CUTLASS's, but for what is loaded. A tile's rows
// of x begin at any row, and its rows of the weight at any row of all groups' weights, one below the other. Rows that a
// box has of the next group give sums that are not stored.
//
// The weights may be transposed: K lies across memory. wgmma reads such a tile as it is, 64 rows of the weight after
// the other, which are the columns of a box. What a box has behind K must be zeros, as in x, for a NaN times zero would
// be one: so groups are a dimension of the descriptor.
//
// With two weights, as in pair_mainloop.cuh, the stage's columns are rows of the first weight, then of the second one.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "gemm/sm90/kernel.cuh"

namespace epigemm::sm90 {

// Base: CUTLASS's collective for tiles of x by Weights tiles of weights, or in the transpose (IsTileTransposed) the
// other way round.
template <class Base, int Weights, bool IsTileTransposed, bool IsWeightTransposed>
struct GroupedMainloop : Base {
  using Element = typename Base::ElementA;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using Pipeline = typename Base::MainloopPipeline;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;

  static constexpr int kWeights = Weights;
  static constexpr int kRows = cute::get<0>(typename Base::TileShape{});
  static constexpr int kColumns = cute::get<1>(typename Base::TileShape{});
  static constexpr int kStageElements = cute::get<2>(typename Base::TileShape{});  // of K, a row's 128 bytes
  static constexpr int kRowsOfX = IsTileTransposed ? kColumns : kRows;
  static constexpr int kRowsOfWeight = (IsTileTransposed ? kRows : kColumns) / Weights;
  // The CTAs of a cluster are neighbours along N, and share a tile of x: each loads a part for all.
  static constexpr int kCtas = cute::size(ClusterShape{}), kBoxRowsOfX = kRowsOfX / kCtas;
  static_assert(cute::size<IsTileTransposed ? 1 : 0>(ClusterShape{}) == 1, "CTAs along M may be of two groups");
  static_assert(!IsTileTransposed || Weights == 1, "no such epilogue");
  static constexpr int kBoxRowsOfWeight = 64;  // of a transposed weight: 128 bytes

  using KMajor = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using OfWeight = std::conditional_t<IsWeightTransposed, cute::GMMA::Layout_MN_SW128_Atom<Element>, KMajor>;
  static_assert(
      std::is_same_v<typename Base::SmemLayoutAtomA, std::conditional_t<IsTileTransposed, OfWeight, KMajor>> &&
          std::is_same_v<typename Base::SmemLayoutAtomB, std::conditional_t<IsTileTransposed, KMajor, OfWeight>>,
      "rows are not swizzled as TMA does");
  static_assert(typename Base::SmemLayoutA{}.layout_b()(0, 0, 1) == kRows * kStageElements &&
                    typename Base::SmemLayoutB{}.layout_b()(0, 0, 1) == kColumns * kStageElements &&
                    typename Base::SmemLayoutA{}.layout_b()(kRows / 2, 0, 0) == kRows / 2 * kStageElements &&
                    typename Base::SmemLayoutB{}.layout_b()(kColumns / 2, 0, 0) == kColumns / 2 * kStageElements,
                "stages are not rows, or boxes of them, one behind the other");
  static_assert(!IsWeightTransposed || kRowsOfWeight % kBoxRowsOfWeight == 0);

  struct Params {
    CUtensorMap x, weights[Weights];
    int weight_rows;  // from a group's weight to the next one's, if they are not transposed
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.x);
    for (CUtensorMap const& map : params.weights) cute::prefetch_tma_descriptor(&map);
  }

  // The producer: one thread keeps the stages filled. row: of x; column: a row of the group's weight.
  CUTLASS_DEVICE void load(Params const& params, Pipeline pipeline, PipelineState write, int row, int column, int group,
                           int stages, uint32_t rank, TensorStorage& shared) const {
    if (!cute::elect_one_sync()) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < stages; ++stage, ++write) {
      pipeline.producer_acquire(write);
      auto* const barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(write));
      auto* const a = shared.smem_A.data() + write.index() * kRows * kStageElements;
      auto* const b = shared.smem_B.data() + write.index() * kColumns * kStageElements;
      auto* const x = IsTileTransposed ? b : a;
      auto* const weights = IsTileTransposed ? a : b;
      const int k = stage * kStageElements;
      if constexpr (kCtas > 1) {
        constexpr uint16_t kAll = (1 << kCtas) - 1;
        const int first = static_cast<int>(rank) * kBoxRowsOfX;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.x, barrier, kAll, kCached, x + first * kStageElements, k,
                                               row + first);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(&params.x, barrier, kCached, x, k, row);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Weights; ++i) {
        load_weight(params, params.weights[i], barrier, weights + i * kRowsOfWeight * kStageElements, k, column, group);
      }
    }
  }

  template <class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, PipelineState read, Sums& sums, int stages, int thread,
                          TensorStorage& shared, Params const&) {
    Base::mma(pipeline, read, sums, stages, thread, shared, typename Base::Params{});  // of which it reads none
  }

 private:
  CUTLASS_DEVICE static void load_weight(Params const& params, CUtensorMap const& map, uint64_t* barrier, Element* to,
                                         int k, int column, int group) {
    if constexpr (IsWeightTransposed) {
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kRowsOfWeight; first += kBoxRowsOfWeight) {
        cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kCached, to + first * kStageElements, column + first, k, group);
      }
    } else {
      cute::SM90_TMA_LOAD_2D::copy(&map, barrier, kCached, to, k, group * params.weight_rows + column);
    }
  }

  static constexpr auto kCached = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
};

// Types for groups, whose products are one or two (Weights).
template <class Element, int Stages, Schedule schedule, int Weights, bool IsTileTransposed, bool IsWeightTransposed>
struct GroupedProducts : OneProduct<Element, Stages, schedule> {
  static constexpr int kWeights = Weights;
  static constexpr bool kIsGrouped = true, kIsWeightTransposed = IsWeightTransposed;

  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using LayoutA = std::conditional_t<IsTileTransposed && IsWeightTransposed, Column, Row>;
  using LayoutB = std::conditional_t<!IsTileTransposed && IsWeightTransposed, Row, Column>;

  template <class TileShape, class ClusterShape>
  using Mainloop = GroupedMainloop<Collective<Element, Stages, schedule, TileShape, ClusterShape, LayoutA, LayoutB>,
                                   Weights, IsTileTransposed, IsWeightTransposed>;
};

}  // namespace epigemm::sm90
