// The range check: which results the slices cannot be trusted with. Host and device, pure functions of the row
// statistics.
//
// Only elements below 2^-28 of their row's largest ("tiny" ones) lose bits. On the row's scale, where the largest is at
// least 2^13, a tiny one loses at most 2^-36 in its slices, and less than that in the product of both lo, which is left
// out: 2^-35 together. In a result they do harm only if their partners in the other operand are much larger than
// the partners of the large elements. Let B be the number of large elements (at least 2^-8 of the row's largest) of the
// row of x, C that of the row of the weight. Of K positions at least B + C - K then hold a large element of both, so
//
//   sum |x_k| |w_k|  >=  (B + C - K) 2^-16 max|x| max|w|,      what is lost  <=  (K - B) 2^-48 max|x| max|w|.
//
// With B + C - K >= K / 64 the loss is below 2^-26 of the sum: a quarter of fp32's own rounding unit. Ordinary matrices
// are far above it; activations of which nine tenths are zeros still are against a dense weight. The same holds for one
// slice, whose tiny elements lose 2^-25, measured against TF32's 2^-11.
//
// So a pair of rows needs another arithmetic only if one of them has tiny elements and B + C - K falls short.
//
// The count knows nothing of *where* the large elements are: two rows that are half zeros fall short, as after a ReLU,
// although they nearly always meet. The fixup therefore sums |x_k| |w_k| over some of K. Scaled elements are below
// 2^15, so T tiny ones lose at most T 2^-20. (One slice: T 2^-10.) A sum of 2^6 T would be large enough for that. 2^18
// T also leaves those rows to fp32 that spread so far that few products count: their 24 bits are better there than 22.
#pragma once

#include "gemm/fp16_slices/slices.h"

namespace epigemm::fp16_slices {

// The statistics of several rows at once.
struct RangeStatistics {
  int32_t least_large = kLargeMask;          // the smallest count among the rows
  int32_t least_large_of_tiny = kLargeMask;  // among the rows with tiny elements
  int32_t flags = 0;
};

EPIGEMM_HOST_DEVICE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

EPIGEMM_HOST_DEVICE RangeStatistics range_statistics(int32_t row) {
  const int32_t large = row & kLargeMask;
  return {large, row & kTiny ? large : kLargeMask, row & ~kLargeMask};
}

EPIGEMM_HOST_DEVICE RangeStatistics combine(const RangeStatistics& a, const RangeStatistics& b) {
  return {smaller(a.least_large, b.least_large), smaller(a.least_large_of_tiny, b.least_large_of_tiny),
          a.flags | b.flags};
}

EPIGEMM_HOST_DEVICE bool too_few_large(int32_t large_x, int32_t large_weight, int64_t columns) {
  const int64_t needed = columns / 64 > 1 ? columns / 64 : 1;
  return int64_t(large_x) + large_weight - columns < needed;
}

// Whether some pair of these rows needs another arithmetic.
EPIGEMM_HOST_DEVICE bool out_of_range(const RangeStatistics& x, const RangeStatistics& weight, int64_t columns) {
  return (x.flags & kTiny && too_few_large(x.least_large_of_tiny, weight.least_large, columns)) ||
         (weight.flags & kTiny && too_few_large(x.least_large, weight.least_large_of_tiny, columns));
}

EPIGEMM_HOST_DEVICE bool has_non_finite(int32_t flags) { return (flags & (kInfinite | kNaN)) != 0; }

// Whether the slices can be trusted with a result although the counts fall short. `sum`: of |x_k| |w_k|, scaled, over
// some of K; `tiny`: of both rows.
EPIGEMM_HOST_DEVICE bool is_large_enough(float sum, int32_t tiny) { return sum >= 0x1p18f * static_cast<float>(tiny); }

}  // namespace epigemm::fp16_slices
