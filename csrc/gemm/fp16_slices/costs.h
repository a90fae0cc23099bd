// What splitting rows is expected to take. Fitted to random shapes on an H200 and an H100 (docs/internals.md).
#pragma once

#include <algorithm>

#include "gemm/fp16_slices/problem.h"
#include "gemm/planner/cost.h"

namespace epigemm::fp16_slices {

// The tables have times of computation at this clock.
constexpr double kFittedClockMhz = 1980;

// Bytes of an element in slices.
constexpr int slice_bytes(Arithmetic arithmetic) { return arithmetic == Arithmetic::Split ? 4 : 2; }

// The time to split `rows` rows (split_rows.cu). A row is read as fp32 and written as slices, by one CTA that holds it
// in registers. The rest of a long row is read again, from L2.
inline double split_microseconds(const Problem& p, int64_t rows) {
  constexpr double kFixed = 5.60, kMemoryFactor = 0.910;
  constexpr double kRow = 0.0535, kByte = 2.21e-5, kSlot = 1.11e-4, kReadAgain = 2.04e-4;  // us of a multiprocessor
  constexpr double kFewRowsElement = 1.33e-4, kLongRow = 3.20;
  constexpr int64_t kFewRows = 264, kLong = 8192;
  using cost::as_double;
  const double bytes = 4 + slice_bytes(p.arithmetic), k = as_double(p.k);
  const int64_t padded = round_up(p.k, 64);
  const bool is_few = rows <= kFewRows;
  const int64_t threads = std::clamp<int64_t>(round_up(padded / 4 / (is_few ? 2 : 8), 32), 32, is_few ? 1024 : 256);
  const int64_t held = ceil_div(padded, 4 * threads) <= 2 ? 2 : 8;
  const int64_t left_over = std::max<int64_t>(padded - 4 * threads * held, 0);
  const double memory = kMemoryFactor * as_double(rows) * k * bytes / p.device.memory_bytes_per_us;
  const double of_a_row =
      kRow + kByte * k * bytes + kSlot * as_double(threads * held * 4) + kReadAgain * as_double(left_over);
  const double work = kFittedClockMhz / p.device.clock_mhz * as_double(rows) / p.device.multiprocessors * of_a_row;
  double us = kFixed + cost::norm4(memory, work);
  if (is_few) us += kFewRowsElement * k;
  if (is_few && p.k > kLong) us += kLongRow * as_double(ceil_div(rows, p.device.multiprocessors));
  return us;
}

// The same of a transposed matrix, which is read across memory, twice: by ten matrices of 1 to 134 million elements on
// an H200, off by up to a fifth.
inline double transposed_split_microseconds(const Problem& p, int64_t rows) {
  constexpr double kFixed = 9, kMemoryFactor = 2.0;
  const double bytes = (4 + slice_bytes(p.arithmetic)) * cost::as_double(rows) * cost::as_double(p.k);
  return kFixed + kMemoryFactor * bytes / p.device.memory_bytes_per_us;
}

// The time to split the weight.
inline double weight_split_microseconds(const Problem& p) {
  return p.is_weight_transposed ? transposed_split_microseconds(p, p.n) : split_microseconds(p, p.n);
}

// The time to copy the roots with which a kernel begins that reads the weight as it lies (weight_roots.cu), beside the
// split of x. The first call finds them in the weight, for many calls.
constexpr double kRootsMicroseconds = 0.5;

}  // namespace epigemm::fp16_slices
