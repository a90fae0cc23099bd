// The scales of a weight that is split on its way to the tensor cores. Host and device.
//
// A row's scale is 2^e, e even. It is remembered from call to call, as its root 2^(-e / 2), 4 bytes a row, and never
// trusted: whoever splits a row sees its largest slice hi and knows from it whether the scale is the row's. For that
// the rule goes by the largest magnitude rounded to fp16's 11 bits, which rounding commutes with a power of two:
//
//   e is the row's  <=>  max|hi| in [2^13, 2^15),  or  max|hi| < 2^13 and e = 126, the largest there is
//
// A row of zeros has e = 126: with any other scale zeros could not be told from numbers that underflow; with this one
// the least subnormal number is 2^-23. So e is a function of the row's numbers alone.
//
// A row with another scale costs a tile's time once more. Where that happens, as it does while a weight is trained,
// somebody looks at the whole weight before each of the next calls (weight_roots.cu), until kLooks of them have found
// every scale as it was.
//
// The range check (range_check.h) for such a row. An element is large if |hi| >= 2^6, whatever the row's largest is (at
// least 2^-9 of it), so that the kernel needs no largest to count by. With B large elements in the row of x, C in the
// weight's, and scaled x_k, w_k, B + C - K positions have
//
//   |x_k| |w_k|  >=  2^-8 max|x| 2^6,       and with B + C - K >= K / 64 their sum is at least  K 2^-8 max|x|
//
// Lost is at most 2^-35 for a tiny element (range_check.h), times the partner: at most max|x| for one of the weight,
// 2^15 <= 2^2 max|x| for one of x. Together that is at most K (2^-35 + 2^-33) max|x|, or 5 / 8 eps (eps = 2^-24) of the
// sum. With one slice, 2^-25 in place of 2^-35: 2^-14.7 of the sum.
#pragma once

#include "gemm/fp16_slices/slices.h"

namespace epigemm::fp16_slices {

constexpr int kLargestExponent = 126, kLeastExponent = 14 - 128;  // of a scale (slices.h: row_exponent)

// Of hi, from which an element of a weight counts as large.
constexpr float kLargeHigh = 0x1p6f;

// Two counts of a thread in one number, to which a pair of elements adds by one subtraction of its mask: 16 bits of
// ones for each element that counts. The low half is the count of the first elements, and the high one how far that of
// the second ones is ahead.
EPIGEMM_HOST_DEVICE uint32_t count_pair(uint32_t counts, uint32_t mask) { return counts - mask; }
EPIGEMM_HOST_DEVICE int32_t counted(uint32_t counts) {
  const uint32_t low = counts & 0xffff, high = (low + (counts >> 16)) & 0xffff;
  return static_cast<int32_t>(low + high);
}

// Each of the two has an eighth of a row's elements.
constexpr int64_t kMostCountedColumns = int64_t(1) << 18;

// e for a row of a weight whose largest finite magnitude is `largest`.
EPIGEMM_HOST_DEVICE int weight_exponent(float largest) {
  if (largest < 0x1p-126f) return kLargestExponent;  // also where rounding to so many bits would leave nothing
  constexpr uint32_t kDropped = 13;                  // bits of fp32's significand that fp16 does not have
  const uint32_t bits = bit_cast<uint32_t>(largest);
  const uint32_t to_even = (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  return row_exponent(bit_cast<float>((bits + to_even) >> kDropped << kDropped));
}

// Whether a scale is that of a row in which `largest` are the bits of max|hi|, as fp16 orders them: infinities and NaN
// come last.
EPIGEMM_HOST_DEVICE bool is_scale_of_row(uint32_t largest, float scale) {
  constexpr uint32_t kFrom = 0x7000, kTo = 0x7800;  // 2^13, 2^15
  return largest < kTo && (largest >= kFrom || scale == 0x1p126f);
}

// The root of some scale, from memory that may hold anything.
EPIGEMM_HOST_DEVICE float some_root(float remembered) {
  constexpr int kBias = 127, kLeast = kBias - kLargestExponent / 2, kMost = kBias - kLeastExponent / 2;
  const int exponent = static_cast<int>(bit_cast<uint32_t>(remembered) >> 23 & 0xff);
  return power_of_two((exponent < kLeast ? kLeast : exponent > kMost ? kMost : exponent) - kBias);
}

constexpr int kLooks = 8;

// In place of a row's count of tiny elements: nobody has counted them. Then there may be some.
constexpr int32_t kUncounted = -1;

// The statistics of a row of a weight (slices.h), which has no numbers that are not finite. A row of zeros has no tiny
// ones, and all of it counts as large.
EPIGEMM_HOST_DEVICE int32_t weight_statistics(int32_t large, bool is_zero, int64_t columns) {
  return is_zero ? static_cast<int32_t>(columns) : large | kTiny;
}

}  // namespace epigemm::fp16_slices
