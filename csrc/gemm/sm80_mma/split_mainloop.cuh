// The mainloop of the split product: fp32 accuracy from three fp16 products of two slices each.
//
//   sum = sum hi_x hi_w  +  2^-11 sum (lo_x hi_w + hi_x lo_w)
//
// gemm/fp16_slices/slices.h says what hi and lo are. As in sm90_fp16x3/mainloop.h the tensor cores, which truncate when
// they accumulate, sum the large products over a short stretch of K only: 32, a stage. Then that sum is added, rounded,
// to the fp32 sums. What is different from there, and why:
//
// - mma.sync has its results in any registers. A thread finishes 16 of its warp's rows after the other, so the sums
//   over a stage take 16 registers of each kind, and not as many as there are results.
// - The small products are added to the large ones at each promotion. Their rounding counts 2^-11 as much.
// - Every 32 of K at any K: for a stretch of 64 a thread would hold two stages of the weight.
//
// In the tile for few rows, whose sums take 32 registers, promotions are added up in blocks of 512, as there.
#pragma once

#include "gemm/sm80_mma/ring.cuh"

namespace epigemm::sm80_mma {

constexpr int kStagesOfBlock = 16;
constexpr float kLowScale = 0x1p-11f;  // lo is kept 2^11 times larger

// Adds the sums over a stage to those of the same rows.
template <class Large, class Small, class Sums>
__device__ __forceinline__ void promote(Large const& large, Small const& small, Sums&& sums) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(large); ++i) sums(i) += fmaf(small(i), kLowScale, large(i));
}

// Adds the sums of a block of K to those of the blocks before it.
template <class Sums, class Blocks>
__device__ __forceinline__ void end_block(Sums& sums, Blocks& blocks) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(sums); ++i) blocks(i) += sums(i), sums(i) = 0;
}

// The sums of the CTA's share of K, whose length is `k`, without the rows' scales.
template <class Config, class Sums>
__device__ __forceinline__ void multiply_slices(Ring<Config>& ring, int k, Sums& sums) {
  using namespace cute;
  with_fragments(ring, [&](auto& mma, auto& of_x, auto& of_weight, auto const& read_x, auto const& read_weight) {
    constexpr int kRows = size<1>(remove_cvref_t<decltype(of_x)>{});          // 16 rows of x each
    constexpr int kParts = size<2>(remove_cvref_t<decltype(of_x)>{}) / 2;     // of hi; those of lo follow
    constexpr int kColumns = size<1>(remove_cvref_t<decltype(of_weight)>{});  // 8 rows of the weight each
    static_assert(kParts == 2 && kParts * Config::tile.instruction_k() == Config::tile.columns());
    const auto read_both = [](auto const& read, auto rows, int part, int stage) {
      read(rows, part, stage), read(rows, part + kParts, stage);
    };
    const auto multiply_rows = [&](int rows, int part_of_x, int part_of_weight, auto& to) {
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        gemm(mma, of_x(_, rows, part_of_x), of_weight(_, column, part_of_weight), to(_, column));
      }
    };

    constexpr bool kHasBlocks = size(Sums{}) <= 32;
    Tensor blocks = make_fragment_like(sums);  // the sum of those that are complete
    Tensor large = make_fragment_like(sums(_, 0, _));
    Tensor small = make_fragment_like(large);
    clear(sums);
    if constexpr (kHasBlocks) clear(blocks);
    constexpr int kBegunAhead = (Config::tile.stages - 1) * Config::tile.k;
    int reading = 0;
    ring.wait();
    read_both(read_x, 0, 0, reading);
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) read_both(read_weight, _, part, reading);
    CUTLASS_PRAGMA_NO_UNROLL
    for (bool is_at_last = false; !is_at_last;) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kParts; ++i) {
        const int rows = i / kParts, part = i % kParts, next = (i + 1) % (kRows * kParts);
        const bool is_last = next == 0;
        // Here, and not at the end of the stage, so that the products behind it hide the next stage's first reads.
        if (i == 1) {
          ring.template wait<Config::tile.stages - 2>();
          ring.begin(ring.free(reading));
        }
        if (is_last) reading = ring.next(reading);
        read_both(read_x, next / kParts, next % kParts, reading);
        // The next stage's, where this one's have been multiplied.
        if (is_last) read_both(read_weight, _, 0, reading);
        if (part == 0) clear(large), clear(small);
        multiply_rows(rows, part, part, large);
        multiply_rows(rows, part + kParts, part, small);
        multiply_rows(rows, part, part + kParts, small);
        if (is_last) read_both(read_weight, _, 1, reading);
        if (part == kParts - 1) promote(large, small, sums(_, rows, _));
      }
      is_at_last = ring.is_at_last();
      const int begun = k - ring.left;
      if (kHasBlocks && begun % (kStagesOfBlock * Config::tile.k) == kBegunAhead) end_block(sums, blocks);
    }
    if constexpr (kHasBlocks) end_block(blocks, sums);
  });
  cp_async_wait<0>();
}

}  // namespace epigemm::sm80_mma
