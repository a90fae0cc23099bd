// The arithmetic of a split: from an fp32 row to two fp16 slices, and the row's statistics. Host and device.
//
//   scale = 2^e, e even, so that the row's largest finite magnitude times scale lies in [2^13, 2^15)
//   s  = x * scale
//   hi = fp16(s),  lo = fp16((s - hi) * 2^11)
//
// hi and lo together keep 22 bits of every element down to |s| = 2^-14, that is 2^-28 of the row's largest; below, what
// is lost is at most 2^-36. lo is kept 2^11 times larger than its value because fp16's range ends at 2^-24: at its own
// size it would begin to lose bits at 2^-17 of the row's largest already, which nearly every matrix has somewhere.
// e is even so that the GEMM can undo the scale in two equal steps (rescale.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "epilogue/operands.h"

namespace epigemm::fp16_slices {

template <class To, class From>
EPIGEMM_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

constexpr int kLowShift = 11;  // the bits of fp16's significand: what hi leaves over begins 2^11 lower
constexpr float kLowEnlarged = 2048.0f;
constexpr float kSmallestWhole = 0x1p-14f;  // fp16's smallest normal number: below, hi loses bits

// The statistics of a row: a count in the low bits, flags above it.
constexpr int32_t kLargeMask = (1 << 28) - 1;  // how many elements are at least 2^-8 of the row's largest
constexpr int32_t kTiny = 1 << 28;             // some element is tiny, it loses bits: 0 < |s| < 2^-14
constexpr int32_t kInfinite = 1 << 29;
constexpr int32_t kNaN = 1 << 30;
constexpr float kLargeShare = 0x1p-8f;

EPIGEMM_HOST_DEVICE float power_of_two(int exponent) {  // -126..127
  return bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

EPIGEMM_HOST_DEVICE bool is_finite(float x) { return (bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }

EPIGEMM_HOST_DEVICE float magnitude(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }

EPIGEMM_HOST_DEVICE float larger(float a, float b) { return a < b ? b : a; }

// What an element contributes to its row's largest.
EPIGEMM_HOST_DEVICE float finite_magnitude(float x) { return is_finite(x) ? magnitude(x) : 0.0f; }

// e for a row whose largest finite magnitude is `largest`; 0 for a row of zeros. At most 126, so that 2^e is a number:
// a row of subnormals then reaches less far up, which it does not need, having fewer bits.
EPIGEMM_HOST_DEVICE int row_exponent(float largest) {
  if (largest == 0.0f) return 0;
  const bool subnormal = largest < 0x1p-126f;
  const float normal = subnormal ? largest * 0x1p24f : largest;
  const int exponent = static_cast<int>(bit_cast<uint32_t>(normal) >> 23) - 127 - (subnormal ? 24 : 0);
  const int e = 14 - exponent;  // [2^14, 2^15)
  const int even = e - (e & 1);
  return even < 126 ? even : 126;
}

// 2^(-e / 2)
EPIGEMM_HOST_DEVICE float row_root(int e) { return power_of_two(-e / 2); }

// 2^e
EPIGEMM_HOST_DEVICE float scale_of_root(float root) {
  return power_of_two(2 * (127 - static_cast<int>(bit_cast<uint32_t>(root) >> 23)));
}

// The row's scale, and the threshold of its large elements.
struct RowScale {
  float scale;           // 2^e
  float large_from;      // |s| from which an element counts as large
  int32_t large_at_all;  // 1; 0 in a row of zeros, whose statistics are set apart
};

EPIGEMM_HOST_DEVICE RowScale row_scale(float largest) {
  const float scale = power_of_two(row_exponent(largest));
  return {scale, largest * scale * kLargeShare, largest == 0.0f ? 0 : 1};
}

// s; a number that is not finite counts as zero in the slices and is left to the range check.
EPIGEMM_HOST_DEVICE float scaled(float x, const RowScale& row) { return is_finite(x) ? x * row.scale : 0.0f; }

// The element's share in its row statistics: the counts add up, the flags are or-ed.
EPIGEMM_HOST_DEVICE int32_t large_count(float s, const RowScale& row) {
  return magnitude(s) >= row.large_from ? row.large_at_all : 0;
}
EPIGEMM_HOST_DEVICE int32_t tiny_count(float x, float s) {
  return is_finite(x) && x != 0.0f && magnitude(s) < kSmallestWhole ? 1 : 0;
}
EPIGEMM_HOST_DEVICE int32_t element_flags(float x) {
  if (is_finite(x)) return 0;
  return x == x ? kInfinite : kNaN;
}

// A row of zeros loses nothing: all of it counts as large.
EPIGEMM_HOST_DEVICE int32_t row_statistics(int32_t large, int32_t flags, int32_t tiny, const RowScale& row,
                                           int64_t columns) {
  return (row.large_at_all ? large : static_cast<int32_t>(columns)) | flags | (tiny > 0 ? kTiny : 0);
}

template <class Half>
struct Slices {
  Half high, low;
};

// Half's conversions round to nearest, ties to even.
template <class Half, class ToHalf, class ToFloat>
EPIGEMM_HOST_DEVICE Slices<Half> split_element(float s, ToHalf to_half, ToFloat to_float) {
  const Half high = to_half(s);
  return {high, to_half((s - to_float(high)) * kLowEnlarged)};
}

}  // namespace epigemm::fp16_slices
