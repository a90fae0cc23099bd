// Results of 8 bits: y / scale, rounded to e4m3 once and saturated, as torch's division and its cast do it, bit for
// bit. A scale is a factor of dequantisation.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "gemm/scales.h"

namespace epigemm::sm90 {

constexpr int kBlockColumns = 128;

// The type of results of which 128 columns of each row have a scale: what bf16 results would be, quantised.
struct InBlocks : cutlass::float_e4m3_t {};

// Divides numbers by a scale that is not negative. Dividend and divisor are multiplied by a power of two that brings
// the latter into [1, 4): what follows neither overflows nor loses bits, unless the quotient does. The quotient is
// corrected by its remainder (Markstein, 1990), which takes a fourth of the instructions of a division.
class Divisor {
 public:
  CUTLASS_DEVICE explicit Divisor(float scale) {
    constexpr uint32_t kExponent = 0x7f800000, kLeast = 0x00800000, kOfOne = 0x7f000000;
    const uint32_t exponent = __float_as_uint(scale) & kExponent;
    power_ = __uint_as_float(exponent >= kOfOne ? kLeast : kOfOne - exponent);
    scale_ = scale * power_;
    inverse_ = __frcp_rn(scale_);
    if (fabsf(scale_) == __uint_as_float(kExponent)) scale_ = 1;  // whose quotients are zeros, or NaN of infinity
  }

  CUTLASS_DEVICE float of(float number) const {
    constexpr float kBeyond = 1 << 20;  // what saturates, for which the remainder may be infinite
    const float dividend = number * power_, quotient = dividend * inverse_;
    const float less = fmaf(quotient, scale_, -dividend);  // of this sign, -0 remains -0
    return fabsf(quotient) < kBeyond ? fmaf(less, -inverse_, quotient) : quotient;
  }

 private:
  float power_, scale_, inverse_;
};

// Two numbers of e4m3. Infinities become the largest numbers, NaN stays.
CUTLASS_DEVICE uint32_t as_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Numbers of bf16, two in a word.
CUTLASS_DEVICE float low_of(uint32_t word) { return __uint_as_float(word << 16); }
CUTLASS_DEVICE float high_of(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// The larger magnitudes of two words; NaN stays.
CUTLASS_DEVICE uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  return larger;
}

// The scale of a block with this largest magnitude, which may be NaN.
CUTLASS_DEVICE float scale_of_block(float largest) {
  constexpr float kLeast = 0x1p-100f, kLargestE4M3 = 448;
  float bounded;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(largest), "f"(kLeast));
  return __fdiv_rn(bounded, kLargestE4M3);
}

// The results of a pass, whose rows are blocks: of bf16, two columns in a word, which become two bytes. A thread has
// two of every 64 rows, and two of every eight columns; four neighbouring lanes have a row.
template <int kEights, class Params, class Place>
CUTLASS_DEVICE void quantise_blocks(uint32_t (&words)[kEights * 2], Params const& params, Place place, int warp,
                                    int lane) {
  uint32_t largest[2] = {};
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kEights; ++j) {
    const int column = place.column + j * 8 + lane % 4 * 2;
    const uint32_t inside = column + 1 < params.columns ? ~0u : column < params.columns ? 0xffff : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) largest[r] = larger_magnitudes(largest[r], words[j * 2 + r] & inside);
  }
  OutScale const& to = params.out_scale;
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    uint32_t most = largest[r];
    most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, 1));
    most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, 2));
    most = larger_magnitudes(most, most >> 16);
    const float scale = scale_of_block(low_of(most));
    const int row = place.row + warp * 16 + lane / 4 + r * 8;
    // A cluster's second CTA may have no columns.
    if (lane % 4 == 0 && row < params.rows && place.column < params.columns) {
      to.blocks[place.column / kBlockColumns * to.blocks_step + row] = scale;
    }
    const Divisor divisor(scale);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kEights; ++j) {
      uint32_t& word = words[j * 2 + r];
      word = as_e4m3(divisor.of(low_of(word)), divisor.of(high_of(word)));
    }
  }
}

}  // namespace epigemm::sm90
