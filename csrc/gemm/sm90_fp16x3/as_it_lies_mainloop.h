// The mainloop of products on fp16 slices whose weight is read as it lies in memory, in fp32, and split on the way to
// the tensor cores. So a weight needs no slices of its own, kept or made at every call: one fp32 number has as many
// bytes as its two slices.
//
//   D^T = W x^T,  W from registers (wgmma's operand A), x's slices from shared memory
//   accumulator = sum hi_W hi_x  +  2^-11 sum (lo_W hi_x + hi_W lo_x)        (or the first sum alone: one slice)
//
// It stands where mainloop.h stands, and promotes as that one does, with blocks of 512 of K in the smaller tiles (see
// there). What is different, and why:
//
// - A thread reads the numbers of its two rows of W that wgmma takes from it, 64 bits at once, and converts them. The
//   next step's are converted while the tensor cores work, into another buffer.
// - That takes registers. So tiles of 128 rows of x have no accumulator of small products (multiply_in_turn).
// - It also takes more instructions than fit beside the MMAs: while they run without a pause, a scheduler issues one
//   FADD in six cycles for nothing (measured on an H200), and here it would have one instruction in two. So two slices
//   reach about .73 of the MMAs' rate in tiles of 128 rows of x (.62 below kLongSum), where slices of the weight
//   reach .95.
// - TMA's swizzle would let four rows of a half-warp meet in the same banks. They do not, because x's slices have
//   another order along K (SliceOrder::Turned), and W is read in that order (weight_order.h).
// - The rows' scales are those of an earlier call, of another weight perhaps: nobody says when a weight is written.
//   Each tile looks at its rows while it splits them. If a scale is not the row's (weight_scale.h), the CTA computes
//   its tiles again, with scales that it has read from the rows themselves. So a scale, and with it every bit of a
//   result, depends on the weight alone.
// - The first column of tiles also counts what the range check has to know of the rows.
// - The weight may be transposed, as it is for the gradient of x: then its rows are neighbours in memory.
// - Rows of x may be in groups (sm90/groups.cuh). Groups' weights are a dimension of the descriptor, so that a tile has
//   zeros behind its own group's rows.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "gemm/fp16_slices/layout.h"
#include "gemm/sm90/cta_pipeline.cuh"
#include "gemm/sm90/share_of_k.cuh"
#include "gemm/sm90_fp16x3/row_judge.cuh"
#include "gemm/sm90_fp16x3/weight_order.h"

namespace epigemm::sm90_fp16x3 {

template <class TileShape, class ClusterShape, int Slices, int Stages, bool IsTransposed, bool IsGrouped>
struct AsItLiesMainloop {
  using Element = cutlass::half_t;
  static constexpr int kRows = cute::get<0>(TileShape{}), kColumns = cute::get<1>(TileShape{});  // of W and of x
  static constexpr int kStageK = cute::get<2>(TileShape{}), kSlices = Slices;
  static constexpr bool kIsSplit = Slices == fp16_slices::kSlices;
  static constexpr int kGroups = kRows / 64;  // warpgroups
  static_assert(cute::size(ClusterShape{}) == 1, "a CTA loads for itself, and computes again by itself");
  static_assert(kStageK == fp16_slices::kInterleave, "a stage is one block of hi and its block of lo");

  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, TileShape, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kGroups>, cute::_1, cute::_1>>{}));
  using SmemLayoutX = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::make_shape(cute::Int<kColumns>{}, cute::Int<kStageK>{}, cute::Int<Slices * Stages>{})));
  static_assert(SmemLayoutX{}.layout_b()(8, 0, 0) == 8 * kStageK &&
                    SmemLayoutX{}.layout_b()(0, 0, 1) == kColumns * kStageK,
                "rows and slices are not one behind the other, as TMA writes them");

  using MainloopPipeline = sm90::CtaPipeline<Stages>;
  using PipelineState = cutlass::PipelineState<Stages>;
  using PipelineStorage = typename MainloopPipeline::SharedStorage;

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    // [stage, K / 32, row, 32], or of a transposed weight [stage, row / 32, K, 32]
    cute::array_aligned<float, kRows * kStageK * Stages, 1024> weight;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutX>, 1024> x;  // [stage, slice, row, 64]
  };

  static constexpr int kSteps = kStageK / kStepK;
  static constexpr int kWeightBoxes = IsTransposed ? kRows / kBoxRows : kStageK / kBoxK;  // of a stage
  static constexpr int kBoxHeight = IsTransposed ? kStageK : kRows;
  static constexpr uint32_t kStageBytes = kStageK * (kRows * sizeof(float) + Slices * kColumns * sizeof(Element));
  static constexpr int kPrefetchedStages = 12;
  static constexpr int kLongSum = 4096;  // from this K on promotions every 64 of K, where sums have no blocks
  static constexpr int kStagesPerBlock = 8;
  static constexpr bool kHasBlocks = kIsSplit && kRows * kColumns <= 32 * 128 * kGroups;
  static constexpr float kLowScale = 0x1p-11f, kLowEnlarged = 0x1p11f;

  struct Params {
    CUtensorMap weight, x;
    uint32_t tma_transaction_bytes = kStageBytes;
    bool long_sum, is_weight_read_once;
    std::conditional_t<IsGrouped, GroupedWeightRows, WeightRows> rows;
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.weight);
    cute::prefetch_tma_descriptor(&params.x);
  }

  // Some stages of W's tile `m` come into L2 while the split of x runs (mainloop.h).
  CUTLASS_DEVICE static void prefetch_rows(Params const& params, int m, sm90::StepsOfK stages) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = stages.first; stage < stages.first + stages.count; ++stage) {
      CUTLASS_PRAGMA_UNROLL
      for (int box = 0; box < kWeightBoxes; ++box) {
        const Corner corner = corner_of(stage, box, m * kRows);
        cute::SM90_TMA_LOAD_2D::PREFETCH::copy(&params.weight, corner.x, corner.y);
      }
    }
  }

  // Returns nothing: there are no tensors along K, and `load` counts its stages itself.
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const&, Params const&) const {
    return cute::make_tuple(cute::make_shape(0, 0, 0, 0));
  }

  // The producer: one thread keeps the stages filled. row: of the group's weight; column: a row of x.
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write, int row, int column,
                           int group, sm90::StepsOfK stages, TensorStorage& shared) const {
    using Hint = cute::TMA::CacheHintSm90;
    if (!cute::elect_one_sync()) return;
    const auto of_weight = static_cast<uint64_t>(params.is_weight_read_once ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = stages.first; stage < stages.first + stages.count; ++stage, ++write) {
      pipeline.producer_acquire(write);
      auto* const barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(write));
      float* const weight = shared.weight.data() + write.index() * kRows * kStageK;
      Element* const x = shared.x.data() + write.index() * Slices * kColumns * kStageK;
      CUTLASS_PRAGMA_UNROLL
      for (int box = 0; box < kWeightBoxes; ++box) {
        const Corner corner = corner_of(stage, box, row);
        float* const to = weight + box * kBoxHeight * kBoxK;
        if constexpr (IsGrouped) {
          cute::SM90_TMA_LOAD_3D::copy(&params.weight, barrier, of_weight, to, corner.x, corner.y, group);
        } else {
          cute::SM90_TMA_LOAD_2D::copy(&params.weight, barrier, of_weight, to, corner.x, corner.y);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int slice = 0; slice < Slices; ++slice) {
        cute::SM90_TMA_LOAD_2D::copy(&params.x, barrier, static_cast<uint64_t>(Hint::EVICT_LAST),
                                     x + slice * kColumns * kStageK, (stage * Slices + slice) * kStageK, column);
      }
    }
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState write) {
    if (cute::elect_one_sync()) pipeline.producer_tail(write);
  }

  // Before a tile: the scales of the thread's rows. `row`: the warpgroup's first one, of the group's weight. `counts`:
  // the tile is the first of its rows. `is_again`: the scales are those that judge_rows has found.
  CUTLASS_DEVICE void take_rows(Params const& params, int group, int row, bool counts, bool is_again) {
    judge.take(params.rows.of(group), row, is_again);
    counts_rows = counts;
  }

  // Behind it. Where CTAs share K, what each has seen of its part is gathered before it is judged.
  CUTLASS_DEVICE RowJudge::Seen seen_rows() const { return judge.seen(); }

  // Returns whether the tile has to be computed again.
  CUTLASS_DEVICE bool judge_rows(Params const& params, int group, RowJudge::Seen const& seen, int row,
                                 bool counts) const {
    return judge.look(params.rows.of(group), seen, row, counts);
  }

  // The consumers: each warpgroup multiplies its rows of the tile.
  template <class Fragment>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator, int k_tile_count,
                          int thread_index, TensorStorage& shared, Params const& params) {
    if (counts_rows) {
      by_length</*Counts=*/true>(pipeline, read, accumulator, k_tile_count, thread_index, shared, params);
    } else {
      by_length</*Counts=*/false>(pipeline, read, accumulator, k_tile_count, thread_index, shared, params);
    }
  }

  // Every MMA has been waited for: only the last stage is still to be released.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState release, int k_tile_count) {
    release.advance(k_tile_count - 1);
    pipeline.consumer_release(release);
  }

 private:
  // Of a box of the weight, in memory.
  struct Corner {
    int x, y;
  };
  CUTLASS_DEVICE static Corner corner_of(int stage, int box, int row) {
    if constexpr (IsTransposed) return {row + box * kBoxRows, stage * kStageK};
    return {stage * kStageK + box * kBoxK, row};
  }

  // The numbers of a step that a thread has of its two rows, as wgmma takes them: [K + 8, row + 8, neighbour in K].
  struct Numbers {
    float at[2][2][2];
  };
  static constexpr int kWords = 4;  // of two fp16 numbers each, of operand A in a thread

  RowJudge judge;
  bool counts_rows;

  template <bool Counts, class Fragment>
  CUTLASS_DEVICE void by_length(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator, int k_tile_count,
                                int thread_index, TensorStorage& shared, Params const& params) {
    if constexpr (!kIsSplit) {
      multiply_one<Counts>(pipeline, read, accumulator, k_tile_count, thread_index, shared);
    } else if constexpr (kHasBlocks) {
      multiply<Counts>(pipeline, read, accumulator, k_tile_count, thread_index, shared);
    } else if (params.long_sum) {
      multiply_in_turn<Counts, /*StepsPerPromotion=*/4>(pipeline, read, accumulator, k_tile_count, thread_index,
                                                        shared);
    } else {
      multiply_in_turn<Counts, /*StepsPerPromotion=*/2>(pipeline, read, accumulator, k_tile_count, thread_index,
                                                        shared);
    }
  }

  CUTLASS_DEVICE static void load_numbers(uint32_t weight, int stage, int step, Numbers& to) {
    if constexpr (IsTransposed) return load_transposed(weight, stage, step, to);
    const uint32_t box = weight + (stage * kWeightBoxes + step / kStepsOfBox) * kRows * kBoxRowBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t address = box ^ weight_chunk(step % kStepsOfBox, half) * 16;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(to.at[half][r][0]), "=f"(to.at[half][r][1])
                     : "r"(address + r * 8 * kBoxRowBytes));
      }
    }
  }

  CUTLASS_DEVICE static void load_transposed(uint32_t weight, int stage, int step, Numbers& to) {
    const uint32_t first = weight + stage * kRows * kStageK * static_cast<uint32_t>(sizeof(float));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4, r = i / 2 % 2, e = i % 2;
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(to.at[half][r][e])
                   : "r"(transposed_address(first, step, half, r, e)));
    }
  }

  // Volatile, so that the conversions are not moved before a wait for the MMAs that read the registers they write.
  CUTLASS_DEVICE static void keep_behind(Numbers& numbers) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(numbers.at[i / 4][i / 2 % 2][i % 2])::"memory");
  }

  // One step's numbers, in slices (slices.h: split_element, two at once).
  template <bool Counts, class Words>
  CUTLASS_DEVICE void convert(Numbers const& numbers, Words&& high, Words&& low) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const int r = i % 2;
      float const(&x)[2] = numbers.at[i / 2][r];
      const float s[2] = {x[0] * judge.scales[r], x[1] * judge.scales[r]};
      const __half2 both = __floats2half2_rn(s[0], s[1]);
      high(i) = fp16_slices::bit_cast<uint32_t>(both);
      if constexpr (kIsSplit) {
        const float2 back = __half22float2(both);
        low(i) = fp16_slices::bit_cast<uint32_t>(
            __floats2half2_rn((s[0] - back.x) * kLowEnlarged, (s[1] - back.y) * kLowEnlarged));
      }
      judge.see(r, both);
      if constexpr (Counts) judge.count(r, both);
    }
  }

  template <class Tensor>
  CUTLASS_DEVICE static auto words_of(Tensor& a, int buffer) {
    return cute::recast<uint32_t>(a(cute::_, cute::_, buffer));
  }

  // The address of the thread's first numbers.
  CUTLASS_DEVICE static uint32_t first_number(TensorStorage& shared, int thread) {
    const uint32_t offset = IsTransposed ? transposed_offset(thread, kStageK) : weight_offset(thread);
    return cute::cast_smem_ptr_to_uint(shared.weight.data()) + offset;
  }

  CUTLASS_DEVICE static auto operand_x(TensorStorage& shared) {
    using namespace cute;
    auto const slice = TiledMma{}.get_slice(0);  // x's rows are the same for all warpgroups
    return slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(shared.x.data()), SmemLayoutX{})));
  }

  // Buffers of operand A, of a step each: (MMA, MMA_M, buffer).
  template <int Buffers>
  CUTLASS_DEVICE static auto operand_weight() {
    using namespace cute;
    return make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Buffers>>{});
  }

  // The stage before this one is free. (Its state would take registers.)
  CUTLASS_DEVICE static void release_before(MainloopPipeline& pipeline, PipelineState const& read) {
    const int stage = read.index();
    pipeline.consumer_release(PipelineState{stage == 0 ? Stages - 1 : stage - 1, /*phase=*/0, /*count=*/0});
  }

  // A step's numbers are loaded and converted while the MMAs of the step before run, into the buffer of the step before
  // that. The loop begins where a stage is waited for, the only branch in there: with one between MMAs and a promotion
  // sums are spilled. Large products never run on into the next round, where the compiler would wait for every MMA.
  template <bool Counts, class Fragment>
  CUTLASS_DEVICE void multiply(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator, int k_tile_count,
                               int thread, TensorStorage& shared) {
    using namespace cute;
    constexpr int kStepsPerPromotion = 2;
    TiledMma mma_large, mma_small;
    const uint32_t weight = first_number(shared, thread);
    Tensor const x = operand_x(shared);  // (MMA, MMA_N, MMA_K, stage and slice)
    Tensor high = operand_weight<2>(), low = operand_weight<2>();
    Tensor large = make_fragment_like(accumulator);
    Tensor small = make_fragment_like(accumulator);
    Tensor blocks = make_fragment_like(accumulator);  // the sum of those that are complete
    clear(accumulator);
    clear(small);
    clear(blocks);

    for (int k_tile = 0; k_tile < k_tile_count; ++k_tile, ++read) {
      pipeline.consumer_wait(read);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const int buffer = step % 2;
        const bool is_first = step % kStepsPerPromotion == 0, is_last = (step + 1) % kStepsPerPromotion == 0;
        Numbers numbers;
        load_numbers(weight, read.index(), step, numbers);
        warpgroup_wait<1>();  // all but the step before
        if (step == 1 && k_tile > 0) release_before(pipeline, read);
        keep_behind(numbers);
        convert<Counts>(numbers, words_of(high, buffer), words_of(low, buffer));

        const int slice = Slices * read.index();
        mma_large.accumulate_ = is_first ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        warpgroup_fence_operand(large);
        warpgroup_fence_operand(small);
        warpgroup_arrive();
        gemm(mma_large, high(_, _, buffer), x(_, _, step, slice), large);
        if (is_last) warpgroup_commit_batch();
        gemm(mma_small, low(_, _, buffer), x(_, _, step, slice), small);
        gemm(mma_small, high(_, _, buffer), x(_, _, step, slice + 1), small);
        warpgroup_commit_batch();
        if (is_last) {
          warpgroup_wait<1>();  // the large products are done; the small ones run on
          warpgroup_fence_operand(large);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < size(accumulator); ++i) accumulator(i) += large(i);
        }
      }
      if ((k_tile + 1) % kStagesPerBlock == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(accumulator); ++i) blocks(i) += accumulator(i), accumulator(i) = 0;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(small);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accumulator); ++i) {
      accumulator(i) = fmaf(small(i), kLowScale, accumulator(i) + blocks(i));
    }
  }

  // Two accumulators in place of three, of 64 registers each: with three, and operand A, sums are spilled. The tensor
  // cores sum a promotion's small products, then the large ones on top of them; no sum is rounded more often. Between
  // the two a warpgroup waits, and the other one's MMAs run. Each step has buffers of its own, so that none waits for
  // the MMAs of the one before the last.
  template <bool Counts, int StepsPerPromotion, class Fragment>
  CUTLASS_DEVICE void multiply_in_turn(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator,
                                       int k_tile_count, int thread, TensorStorage& shared) {
    using namespace cute;
    TiledMma mma;
    const uint32_t weight = first_number(shared, thread);
    Tensor const x = operand_x(shared);
    Tensor high = operand_weight<StepsPerPromotion>(), low = operand_weight<StepsPerPromotion>();
    Tensor part = make_fragment_like(accumulator);
    clear(accumulator);
    for (int k_tile = 0; k_tile < k_tile_count; ++k_tile, ++read) {
      pipeline.consumer_wait(read);
      const int slice = Slices * read.index();
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kSteps; first += StepsPerPromotion) {
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < StepsPerPromotion; ++i) {
          Numbers numbers;
          load_numbers(weight, read.index(), first + i, numbers);
          warpgroup_wait<StepsPerPromotion - 1>();  // for none: without it the compiler would wait for each MMA
          keep_behind(numbers);
          convert<Counts>(numbers, words_of(high, i), words_of(low, i));
          warpgroup_fence_operand(part);
          warpgroup_arrive();
          gemm(mma, low(_, _, i), x(_, _, first + i, slice), part);
          mma.accumulate_ = GMMA::ScaleOut::One;
          gemm(mma, high(_, _, i), x(_, _, first + i, slice + 1), part);
          warpgroup_commit_batch();
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(part);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(part); ++i) part(i) *= kLowScale;
        warpgroup_fence_operand(part);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < StepsPerPromotion; ++i) gemm(mma, high(_, _, i), x(_, _, first + i, slice), part);
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(part);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(accumulator); ++i) accumulator(i) += part(i);
      }
      if (k_tile + 1 < k_tile_count) pipeline.consumer_release(read);
    }
  }

  // One slice: summed on the tensor cores alone. No MMA runs on into the next round, where the compiler would wait for
  // each of them; meanwhile those of the other warpgroup run.
  template <bool Counts, class Fragment>
  CUTLASS_DEVICE void multiply_one(MainloopPipeline pipeline, PipelineState read, Fragment& accumulator,
                                   int k_tile_count, int thread, TensorStorage& shared) {
    using namespace cute;
    TiledMma mma;
    const uint32_t weight = first_number(shared, thread);
    Tensor const x = operand_x(shared);
    Tensor high = operand_weight<kSteps>();
    clear(accumulator);
    for (int k_tile = 0; k_tile < k_tile_count; ++k_tile, ++read) {
      pipeline.consumer_wait(read);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        Numbers numbers;
        load_numbers(weight, read.index(), step, numbers);
        warpgroup_wait<kSteps - 1>();  // for none, as above
        keep_behind(numbers);
        convert<Counts>(numbers, words_of(high, step), words_of(high, step));
        warpgroup_fence_operand(accumulator);
        warpgroup_arrive();
        gemm(mma, high(_, _, step), x(_, _, step, read.index()), accumulator);
        warpgroup_commit_batch();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(accumulator);
      if (k_tile + 1 < k_tile_count) pipeline.consumer_release(read);
    }
  }
};

}  // namespace epigemm::sm90_fp16x3
