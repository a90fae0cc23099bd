// How a matrix is divided among the threads of an elementwise kernel. Host and device both use this file.
#pragma once

#include <cstdint>

#include "epilogue/operands.h"

namespace epigemm::cuda {

constexpr int kThreads = 256;     // of a block
constexpr int kVectorBytes = 16;  // the widest access of a thread

// index / count and index % count without a division: with inverse = floor((2^64 - 1) / count) the estimated quotient
// is at most one too small, because its error is below index / 2^64.
struct Divider {
  uint64_t count, inverse;

  static Divider by(int64_t count) {
    return {static_cast<uint64_t>(count), count > 0 ? UINT64_MAX / static_cast<uint64_t>(count) : 0};
  }
  // `Remainder`: 32 bits do for a count that fits into 31.
  template <class Remainder>
  EPIGEMM_HOST_DEVICE int64_t divide(int64_t index, Remainder& remainder) const {
#if defined(__CUDA_ARCH__)
    const uint64_t quotient = __umul64hi(static_cast<uint64_t>(index), inverse);
#else
    const auto quotient = static_cast<uint64_t>(static_cast<unsigned __int128>(index) * inverse >> 64);
#endif
    const auto divisor = static_cast<Remainder>(count);
    remainder = static_cast<Remainder>(index) - static_cast<Remainder>(quotient) * divisor;
    const bool is_small = remainder >= divisor;
    if (is_small) remainder -= divisor;
    return static_cast<int64_t>(quotient) + is_small;
  }
};

// Where a thread's part begins.
struct Place {
  int64_t row, column;
};

// A thread has `width` neighbouring columns of `rows_of_thread` rows. Threads are numbered along the rows, so that
// those of a row share lines of memory.
struct Tiling {
  int64_t threads;
  Divider across;

  // `width` is that of a vector where all rows begin at multiples of it, else 1.
  static Tiling of(int64_t m, int64_t n, int width, int rows_of_thread) {
    const int64_t across = n / width + (n % width != 0), down = m / rows_of_thread + (m % rows_of_thread != 0);
    return {across * down, Divider::by(across)};
  }
  int64_t blocks() const { return threads / kThreads + (threads % kThreads != 0); }

  template <class Count>
  EPIGEMM_HOST_DEVICE Place place_of(int64_t thread, int width, int rows_of_thread) const {
    Count column;
    const int64_t row = across.divide(thread, column);
    return {row * rows_of_thread, static_cast<int64_t>(column) * width};
  }
};

}  // namespace epigemm::cuda
