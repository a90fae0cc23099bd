// A slab of a slot, in which a pass's results lie before TMA stores them: rows of D of 64 or 128 bytes, swizzled as by
// TMA. Free of CUTLASS, so that a test on the host reads slabs as kernels do.
#pragma once

#include <cstdint>

#include "reduce/moments.h"

namespace epigemm::sm90 {

// The place of 16 bytes within their row, in units of 16 bytes.
template <int kRowBytes>
EPIGEMM_HOST_DEVICE uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return kRowBytes == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
}

// Four warps reduce a slab together. Numbers: `kCount` of them are in a word of 4 bytes, `at(word, i)` is one. Load:
// from an address to the word there, or to the 4 words.
constexpr int kReducingWarps = 4;

// One lane's part of the column statistics of a slab of SlabRows rows, a multiple of 8. A warp has a quarter of each
// row's words, and a lane one of them, in some of the rows; lanes kWords apart have the same columns. At once the lanes
// read rows that are swizzled differently, so they read each bank once.
template <class Numbers, int kRowBytes, int SlabRows, class Load>
struct SlabMoments {
  static constexpr uint32_t kWords = kRowBytes / 4 / kReducingWarps;  // of a row
  static constexpr int kRowsOfEight = kWords / 4;              // of every eight rows, that a lane has: neighbours
  static constexpr int kOfLane = SlabRows / 8 * kRowsOfEight;  // rows
  static_assert(SlabRows % 8 == 0);

  PivotSums<float> columns[Numbers::kCount];

  // Of the whole slab at an address, a multiple of 1024.
  EPIGEMM_HOST_DEVICE SlabMoments(uint32_t slab, uint32_t warp, uint32_t lane) {
    const uint32_t begin = prepare(slab, warp, lane);
    // Unrolled, so that several words are on their way.
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) add(Load::word(place_of(begin, i)));
  }

  // Of its first `rows` rows.
  EPIGEMM_HOST_DEVICE SlabMoments(uint32_t slab, uint32_t warp, uint32_t lane, int rows) {
    const uint32_t begin = prepare(slab, warp, lane);
    const int of_last = rows % 8 - static_cast<int>(first_of(lane));  // rows, of the last eight
    const int own = rows / 8 * kRowsOfEight + (of_last < 0 ? 0 : of_last < kRowsOfEight ? of_last : kRowsOfEight);
#pragma unroll 1
    for (int i = 0; i < own; ++i) add(Load::word(place_of(begin, i)));
  }

  // The first of the lane's columns, in the slab.
  EPIGEMM_HOST_DEVICE static uint32_t column_of(uint32_t warp, uint32_t lane) {
    return (warp * kWords + lane % kWords) * Numbers::kCount;
  }

 private:
  // The first of the lane's rows.
  EPIGEMM_HOST_DEVICE static uint32_t first_of(uint32_t lane) { return lane / kWords * kRowsOfEight; }

  // Sets the pivots; returns the address of the lane's word in its first row.
  EPIGEMM_HOST_DEVICE uint32_t prepare(uint32_t slab, uint32_t warp, uint32_t lane) {
    const uint32_t word = warp * kWords + lane % kWords, first = first_of(lane);
    const uint32_t pivots = Load::word(slab + word * 4);
    for (int i = 0; i < Numbers::kCount; ++i) columns[i] = {pivot_of(Numbers::at(pivots, i))};
    return slab + first * kRowBytes + swizzled<kRowBytes>(first, word / 4) * 16 + word % 4 * 4;
  }

  EPIGEMM_HOST_DEVICE void add(uint32_t word) {
    for (int i = 0; i < Numbers::kCount; ++i) columns[i].add(Numbers::at(word, i));
  }

  // The word in the lane's i-th row.
  EPIGEMM_HOST_DEVICE static uint32_t place_of(uint32_t begin, int i) {
    const int row = i / kRowsOfEight * 8 + i % kRowsOfEight;
    return (begin ^ static_cast<uint32_t>(swizzled<kRowBytes>(i % kRowsOfEight, 0) * 16)) + row * kRowBytes;
  }
};

}  // namespace epigemm::sm90
