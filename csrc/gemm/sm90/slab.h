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
// `at(word, i)` is one. Load: from an address to the word there, or to the 4 words.
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

// The statistics of one row of a slab, by one lane. It reads chunks of 16 bytes, so many at once: where eight lanes
// read those of eight rows, they read each bank once.
template <class Numbers, int kRowBytes, int kAtOnce, class Load>
struct SlabRowMoments {
  static constexpr int kChunks = kRowBytes / 16, kOfChunk = 4 * Numbers::kCount;
  static constexpr int kNumbers = kChunks * kOfChunk;  // of a row
  static_assert(kChunks % kAtOnce == 0);

  // Of two chunks at once, every second number has sums of its own, with the same pivot: they do not wait for each
  // other.
  PivotSums<float> parts[kAtOnce];

  // The first `count` numbers of a row of the slab at an address, a multiple of 1024.
  EPIGEMM_HOST_DEVICE SlabRowMoments(uint32_t slab, int row, int count) {
    // Swizzling exchanges bits of an address within the row, so that of chunk i is first ^ i * 16.
    const uint32_t first = slab + row * kRowBytes + swizzled<kRowBytes>(row, 0) * 16;
    const float pivot = pivot_of(Numbers::at(Load::word(first), 0));
    for (PivotSums<float>& part : parts) part = {pivot};
    constexpr int kNumbersAtOnce = kAtOnce * kOfChunk;
    // The last chunk comes first: counting down takes a register less.
#pragma unroll 1
    for (uint32_t chunk = static_cast<uint32_t>(count / kNumbersAtOnce) * kAtOnce; chunk != 0;) {
      chunk -= kAtOnce;
      uint32_t words[kAtOnce][4];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) Load::chunk(first ^ (chunk + i) * 16, words[i]);
#pragma unroll
      for (int i = 0; i < kNumbersAtOnce; ++i) {
        parts[i % kAtOnce].add(Numbers::at(words[i / kOfChunk][i % kOfChunk / Numbers::kCount], i % Numbers::kCount));
      }
    }
    // Few numbers, and none where rows of D have whole chunks.
#pragma unroll 1
    for (int i = count / kNumbersAtOnce * kNumbersAtOnce; i < count; ++i) {
      const uint32_t place = static_cast<uint32_t>(i / Numbers::kCount) * 4;
      parts[0].add(Numbers::at(Load::word(first ^ place), i % Numbers::kCount));
    }
  }

  // `inverse`: of the count.
  EPIGEMM_HOST_DEVICE BlockMoments<float> moments_by(float inverse) const {
    PivotSums<float> sums = parts[0];
#pragma unroll
    for (int i = 1; i < kAtOnce; ++i) {
      sums.sum += parts[i].sum;
      sums.squares += parts[i].squares;
    }
    return sums.moments_by(inverse);
  }
};

}  // namespace epigemm::sm90
