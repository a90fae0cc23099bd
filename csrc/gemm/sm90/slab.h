// A slab of a slot, in which a pass's results lie before TMA stores them: rows of D of 64 or 128 bytes, swizzled as by
// TMA. Free of CUTLASS, so that a test on the host reads slabs as kernels do.
#pragma once

#include <cstdint>

#include "reduce/moments.h"

namespace epigemm::sm90 {

// The place of 16 bytes within their row, in units of 16 bytes.
template <int kRowBytes>
EPIGEMM_HOST_DEVICE int swizzled(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return kRowBytes == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
}

// One lane's part of the column statistics of a slab. It reads a word of 4 bytes of every row, or of every second one
// if a row has only 16 words; then lane and lane + 16 have the same columns. Numbers: `kCount` of them are in a word,
// `at(word, i)` is one. Load: from the address of a word to the word.
template <class Numbers, int kRowBytes, class Load>
struct SlabMoments {
  static constexpr int kLanes = kRowBytes / 4;  // that have different columns
  static constexpr int kLineBytes = 128, kRowsOfLine = kLineBytes / kRowBytes;
  static constexpr int kAtOnce = 8;  // lines

  PivotSums<float> columns[Numbers::kCount];

  // The first `rows` rows of the slab at an address, a multiple of 1024.
  EPIGEMM_HOST_DEVICE SlabMoments(uint32_t slab, int lane, int rows) {
    const uint32_t pivots = Load::word(slab + lane % kLanes * 4);
    for (int i = 0; i < Numbers::kCount; ++i) columns[i] = {pivot_of(Numbers::at(pivots, i))};
    uint32_t line = slab + lane * 4;
    int left = (rows + kRowsOfLine - 1 - lane / kLanes) / kRowsOfLine;
#pragma unroll 1
    for (; left >= kAtOnce; left -= kAtOnce, line += kAtOnce * kLineBytes) {
      uint32_t words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = Load::word(place_in(line, i));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(words[i]);
    }
#pragma unroll 1
    for (int i = 0; i < left; ++i) add(Load::word(place_in(line, i)));
  }

  // The first of the lane's columns, in the slab.
  EPIGEMM_HOST_DEVICE static int column_of(int lane) { return lane % kLanes * Numbers::kCount; }

 private:
  EPIGEMM_HOST_DEVICE void add(uint32_t word) {
    for (int i = 0; i < Numbers::kCount; ++i) columns[i].add(Numbers::at(word, i));
  }

  // A word in the i-th line from one that is a multiple of kAtOnce. A line has one row, or two that are swizzled alike:
  // both bits of its own number and the 16 bytes' places are those of `swizzled`.
  EPIGEMM_HOST_DEVICE static uint32_t place_in(uint32_t line, int i) {
    return (line ^ static_cast<uint32_t>(swizzled<kRowBytes>(i * kRowsOfLine, 0) * 16)) + i * kLineBytes;
  }
};

}  // namespace epigemm::sm90
