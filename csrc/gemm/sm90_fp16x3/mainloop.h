// The mainloop of the split product: fp32 accuracy from three fp16 products on Hopper's tensor cores.
//
//   accumulator = sum hi_x hi_w  +  2^-11 sum (lo_x hi_w + hi_x lo_w)        (slices.h says what hi and lo are)
//
// It stands where CUTLASS's own CollectiveMma stands (sm90/kernel.cuh). What is different, and why:
//
// - A stage holds four tiles, hi and lo of both operands: each is loaded once for the three products (as one GEMM over
//   3K it would be six tiles).
// - Tensor cores truncate when they accumulate. A sum over all of K would drift towards zero, worse than SGEMM from K ~
//   2000 on. So the large products stay on the tensor cores for a few MMAs only and are then added, rounded, to a
//   second fp32 accumulator ("promotion"): every 64 of K, and every 32 where K is short, for there truncation on
//   all-positive data, where nothing cancels, would reach 1.3 times SGEMM's rms error (docs/numerics.md). In long sums
//   the roundings of the promotions weigh more, and every 64 is also 1 to 4% faster. (Giving back the mean of what
//   truncation takes, by a factor 1 + 2^-23 at each promotion, halves the error at no cost; but then sums of integers
//   are no longer exact.)
// - The small products have an accumulator of their own, for two reasons: lo is kept 2^11 times larger than its value,
//   which widens the range of a row by as much; and what truncation does to a sum 2^11 smaller is harmless over any K,
//   so it is never promoted.
// - The two accumulators also hide the promotion: a warpgroup's additions for the large products run while the tensor
//   cores work on its small ones.
// - At few rows SGEMM splits a long K and so rounds shorter sums. There the tiles are smaller, and so are the
//   accumulators: promotions, every 32 of K, are added up in blocks of 512, and the blocks' sums in a fourth
//   accumulator. K / 32 roundings in a row become 16 and K / 512.
//
// Registers bound the tile: three accumulators of 64 a thread for 128x128 and two warpgroups leave nothing to spare.
#pragma once

#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "gemm/fp16_slices/layout.h"
#include "gemm/sm90/share_of_k.cuh"

namespace epigemm::sm90_fp16x3 {

using fp16_slices::kInterleave;
using fp16_slices::kSlices;

template <class TileShape, class ClusterShape, int Stages>
struct Mainloop {
  using Element = cutlass::half_t;
  using StrideA = cute::Stride<int64_t, cute::_1, int64_t>;  // row, K, batch (there is one)
  using StrideB = StrideA;

  static constexpr int kMmaThreads = 2 * cutlass::NumThreadsPerWarpGroup;
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, TileShape, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      /*two warpgroups along M=*/cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));

  using GmemTiledCopyA =
      decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(cute::shape<1>(ClusterShape{})));
  using GmemTiledCopyB =
      decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(cute::shape<0>(ClusterShape{})));

  template <int Mode>
  using SmemLayout = decltype(cute::tile_to_shape(
      cutlass::gemm::collective::detail::ss_smem_selector<
          cute::GMMA::Major::K, Element, decltype(cute::get<Mode>(TileShape{})), decltype(cute::get<2>(TileShape{}))>(),
      cute::make_shape(cute::get<Mode>(TileShape{}), cute::get<2>(TileShape{}), cute::Int<Stages>{})));
  using SmemLayoutA = SmemLayout<0>;
  using SmemLayoutB = SmemLayout<1>;

  using MainloopPipeline = cutlass::PipelineTmaAsync<Stages>;
  using PipelineState = cutlass::PipelineState<Stages>;
  using PipelineStorage = typename MainloopPipeline::SharedStorage;

  struct TensorStorage : cute::aligned_struct<128, cute::_0> {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutA>> high_a, low_a;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutB>> high_b, low_b;
  };

  struct Arguments {
    Element const* ptr_A;
    StrideA dA;
    Element const* ptr_B;
    StrideB dB;
  };

  // The slices lie as [row, K / 64, slice, 64]: to the tensor memory accelerator one matrix of 2K columns, in which a
  // stage's hi and lo are neighbours in memory.
  static_assert(cute::get<2>(TileShape{}) == kInterleave, "a stage is one block of hi and its block of lo");

  static constexpr int kPrefetchedStages = 12;  // at 16 rows 24 are no faster
  static constexpr int kLongSum = 4096;         // from this K on every 64, where sums have no blocks
  static constexpr int kStagesPerBlock = 8;
  // A thread's registers hold a fourth accumulator where one takes at most 32 of them.
  static constexpr bool kHasBlocks = cute::get<0>(TileShape{}) * cute::get<1>(TileShape{}) <= 32 * kMmaThreads;
  static constexpr float kLowScale = 0x1p-11f;  // lo is kept 2^11 times larger (slices.h)

  struct Params {
    using TMA_A = decltype(make_tma_copy_A_sm90(
        GmemTiledCopyA{},
        cute::make_tensor(static_cast<Element const*>(nullptr), cute::repeat_like(StrideA{}, int32_t(0)), StrideA{}),
        SmemLayoutA{}(cute::_, cute::_, cute::_0{}), TileShape{}, ClusterShape{}));
    using TMA_B = decltype(make_tma_copy_B_sm90(
        GmemTiledCopyB{},
        cute::make_tensor(static_cast<Element const*>(nullptr), cute::repeat_like(StrideB{}, int32_t(0)), StrideB{}),
        SmemLayoutB{}(cute::_, cute::_, cute::_0{}), TileShape{}, ClusterShape{}));
    TMA_A tma_load_a;
    TMA_B tma_load_b;
    uint32_t tma_transaction_bytes;
    bool long_sum;
    int rows_a, columns_a;
  };

  static constexpr uint32_t kStageBytes =
      kSlices * sizeof(Element) * cute::get<2>(TileShape{}) * (cute::get<0>(TileShape{}) + cute::get<1>(TileShape{}));

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem_shape, Arguments const& arguments, void*) {
    auto [M, N, K, L] = cute::append<4>(problem_shape, 1);
    auto const a =
        cute::make_tensor(arguments.ptr_A, cute::make_layout(cute::make_shape(M, kSlices * K, 1), arguments.dA));
    auto const b =
        cute::make_tensor(arguments.ptr_B, cute::make_layout(cute::make_shape(N, kSlices * K, 1), arguments.dB));
    return {
        make_tma_copy_A_sm90(GmemTiledCopyA{}, a, SmemLayoutA{}(cute::_, cute::_, cute::_0{}), TileShape{},
                             ClusterShape{}),
        make_tma_copy_B_sm90(GmemTiledCopyB{}, b, SmemLayoutB{}(cute::_, cute::_, cute::_0{}), TileShape{},
                             ClusterShape{}),
        kStageBytes,
        /*long_sum=*/K >= kLongSum,
        /*rows_a=*/static_cast<int>(M),
        /*columns_a=*/static_cast<int>(kSlices * K),
    };
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.tma_load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
  }

  // Where A is the weight of a product with few rows, its bytes are what takes the time; but the kernel waits for the
  // split of x before its first load. Meanwhile the head of A's tile `m` comes into L2.
  CUTLASS_DEVICE static void prefetch_rows(Params const& params, int m, sm90::StepsOfK stages) {
    using namespace cute;
    static_assert(size(ClusterShape{}) == 1, "a CTA loads its rows by itself");
    Tensor const a = params.tma_load_a.get_tma_tensor(make_shape(params.rows_a, params.columns_a, 1));
    Tensor const tiles = local_tile(a, select<0, 2>(TileShape{}), make_coord(_, _, 0));   // (BLK_M, BLK_K, m, 2k)
    Tensor const from_a = params.tma_load_a.get_slice(0).partition_S(tiles(_, _, m, _));  // (TMA, TMA_M, TMA_K, 2k)
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kSlices * stages.count; ++i) prefetch(params.tma_load_a, from_a(_, _, _, i));
  }

  // (BLK_M, BLK_K, m, 2k, batch) and (BLK_N, BLK_K, n, 2k, batch).
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem_shape, Params const& params) const {
    auto [M, N, K, L] = problem_shape;
    auto const a = params.tma_load_a.get_tma_tensor(cute::make_shape(M, kSlices * K, 1));
    auto const b = params.tma_load_b.get_tma_tensor(cute::make_shape(N, kSlices * K, 1));
    using X = cute::Underscore;
    auto const all = cute::make_coord(cute::_, cute::_, cute::_);
    return cute::make_tuple(cute::local_tile(a, TileShape{}, all, cute::Step<cute::_1, X, cute::_1>{}),
                            cute::local_tile(b, TileShape{}, all, cute::Step<X, cute::_1, cute::_1>{}));
  }

  // The CTAs of the cluster that receive a tile: those in the same row for A, in the same column for B.
  template <bool AlongN>
  CUTLASS_DEVICE static uint16_t multicast_mask(uint2 block_in_cluster) {
    auto const blocks = cute::Layout<ClusterShape>{};
    uint16_t mask = 0;
    for (int i = 0; i < cute::size<AlongN ? 1 : 0>(blocks); ++i) {
      mask |= uint16_t(1) << (AlongN ? blocks(block_in_cluster.x, i, cute::_0{})
                                     : blocks(i, block_in_cluster.y, cute::_0{}));
    }
    return mask;
  }

  // The producer: one thread keeps the stages filled.
  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           cute::tuple<TensorA, TensorB> const& load_inputs, BlockCoord const& block_coord,
                           KTileIterator, int k_tile_count, int, uint32_t block_rank_in_cluster,
                           TensorStorage& shared) {
    using namespace cute;
    if (!elect_one_sync()) return;
    constexpr uint32_t cluster_x = get<0>(ClusterShape{});
    uint2 const block_in_cluster = {block_rank_in_cluster % cluster_x, block_rank_in_cluster / cluster_x};
    auto const tma_a = params.tma_load_a.get_slice(block_in_cluster.y);
    auto const tma_b = params.tma_load_b.get_slice(block_in_cluster.x);
    auto const [m, n, k, l] = block_coord;
    Tensor from_a = tma_a.partition_S(get<0>(load_inputs)(_, _, m, _, l));  // (TMA, TMA_M, TMA_K, 2k)
    Tensor from_b = tma_b.partition_S(get<1>(load_inputs)(_, _, n, _, l));
    Tensor high_a = tma_a.partition_D(make_tensor(make_smem_ptr(shared.high_a.data()), SmemLayoutA{}));
    Tensor low_a = tma_a.partition_D(make_tensor(make_smem_ptr(shared.low_a.data()), SmemLayoutA{}));
    Tensor high_b = tma_b.partition_D(make_tensor(make_smem_ptr(shared.high_b.data()), SmemLayoutB{}));
    Tensor low_b = tma_b.partition_D(make_tensor(make_smem_ptr(shared.low_b.data()), SmemLayoutB{}));
    uint16_t const mask_a = multicast_mask</*AlongN=*/true>(block_in_cluster);
    uint16_t const mask_b = multicast_mask</*AlongN=*/false>(block_in_cluster);

    // Every tile has all of K to itself (nothing splits K): its k tiles are 0, 1, 2, ...
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_tile = 0; k_tile < k_tile_count; ++k_tile, ++write) {
      pipeline.producer_acquire(write);
      auto* const barrier = pipeline.producer_get_barrier(write);
      int const stage = write.index();
      int const high = kSlices * k_tile, low = high + 1;
      copy(params.tma_load_a.with(*barrier, mask_a), from_a(_, _, _, high), high_a(_, _, _, stage));
      copy(params.tma_load_b.with(*barrier, mask_b), from_b(_, _, _, high), high_b(_, _, _, stage));
      copy(params.tma_load_a.with(*barrier, mask_a), from_a(_, _, _, low), low_a(_, _, _, stage));
      copy(params.tma_load_b.with(*barrier, mask_b), from_b(_, _, _, low), low_b(_, _, _, stage));
    }
  }

  // A CTA must not leave while another of its cluster may still multicast into it.
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState write) {
    if (cute::elect_one_sync()) pipeline.producer_tail(write);
  }

  // The consumers: each warpgroup multiplies its rows of the tile.
  template <class Fragment>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator, int k_tile_count,
                          int thread_index, TensorStorage& shared, Params const& params) {
    if (!kHasBlocks && params.long_sum) {
      multiply</*MmasPerPromotion=*/4>(pipeline, read, accumulator, k_tile_count, thread_index, shared);
    } else {
      multiply</*MmasPerPromotion=*/2>(pipeline, read, accumulator, k_tile_count, thread_index, shared);
    }
  }

  template <int MmasPerPromotion, class Fragment>
  CUTLASS_DEVICE void multiply(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator, int k_tile_count,
                               int thread_index, TensorStorage& shared) {
    using namespace cute;
    TiledMma mma_large, mma_small;
    int const warpgroup = __shfl_sync(0xffffffff, thread_index / cutlass::NumThreadsPerWarpGroup, 0);
    auto const slice = mma_large.get_slice(warpgroup * cutlass::NumThreadsPerWarpGroup);
    auto const operand_a = [&](auto& storage) {
      return slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(storage.data()), SmemLayoutA{})));
    };
    auto const operand_b = [&](auto& storage) {
      return slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(storage.data()), SmemLayoutB{})));
    };
    Tensor high_a = operand_a(shared.high_a);  // (MMA, MMA_M, MMA_K, PIPE)
    Tensor low_a = operand_a(shared.low_a);
    Tensor high_b = operand_b(shared.high_b);
    Tensor low_b = operand_b(shared.low_b);

    Tensor large = make_fragment_like(accumulator);
    Tensor small = make_fragment_like(accumulator);
    Tensor blocks = make_fragment_like(accumulator);  // the sum of those that are complete
    clear(accumulator);
    if constexpr (kHasBlocks) clear(blocks);
    mma_small.accumulate_ = GMMA::ScaleOut::Zero;

    constexpr int kMmas = size<2>(decltype(high_a){});
    static_assert(kMmas % MmasPerPromotion == 0, "a stage is a whole number of promotions");
    PipelineState release = read;
    warpgroup_fence_operand(small);
    for (int k_tile = 0; k_tile < k_tile_count; ++k_tile, ++read) {
      pipeline.consumer_wait(read);
      int const stage = read.index();
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kMmas; first += MmasPerPromotion) {
        mma_large.accumulate_ = GMMA::ScaleOut::Zero;
        warpgroup_fence_operand(large);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int i = first; i < first + MmasPerPromotion; ++i) {
          gemm(mma_large, high_a(_, _, i, stage), high_b(_, _, i, stage), large);
          mma_large.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        if (first == 0) {
          // All but the batch just issued are done: the small products of the previous stage, which is free now.
          warpgroup_wait<1>();
          if (k_tile > 0) pipeline.consumer_release(release), ++release;
        }

        warpgroup_fence_operand(small);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int i = first; i < first + MmasPerPromotion; ++i) {
          gemm(mma_small, low_a(_, _, i, stage), high_b(_, _, i, stage), small);
          mma_small.accumulate_ = GMMA::ScaleOut::One;
          gemm(mma_small, high_a(_, _, i, stage), low_b(_, _, i, stage), small);
        }
        warpgroup_commit_batch();

        warpgroup_wait<1>();  // the large products are done; the small ones run on under the promotion
        warpgroup_fence_operand(large);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(accumulator); ++i) accumulator(i) += large(i);
      }
      if (kHasBlocks && (k_tile + 1) % kStagesPerBlock == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(accumulator); ++i) blocks(i) += accumulator(i), accumulator(i) = 0;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(small);
    if constexpr (kHasBlocks) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(accumulator); ++i) accumulator(i) += blocks(i);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accumulator); ++i) accumulator(i) = fmaf(small(i), kLowScale, accumulator(i));
  }

  // Every MMA has been waited for: only the last stage is still to be released.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState release, int k_tile_count) {
    release.advance(k_tile_count - 1);
    pipeline.consumer_release(release);
  }
};

}  // namespace epigemm::sm90_fp16x3
