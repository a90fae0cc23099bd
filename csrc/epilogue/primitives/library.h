// Absolute value, signs and roundings of float and double, and the macros by which the library's functions are taken.
//
// Functions of one name are overloads: of float and double in library.h, transcendental.h and special.h, of Rounded in
// rounded.h, of Dual<T> in dual.h. Those of arithmetic.h are templates made of float's, double's and Rounded's, those
// of activations.h templates made of all. A template finds only what is declared before it: hence the order in which
// these headers are included. NVRTC compiles this text without an include path, and needs no other header for it.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

#include "epilogue/math.h"

namespace epigemm::math {

// Infinity and NaN. They are functions, for NVRTC has no header that defines such constants.
#if defined(__CUDA_ARCH__)
EPIGEMM_HOST_DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
EPIGEMM_HOST_DEVICE double not_a_number() { return __longlong_as_double(0x7ff8000000000000ll); }
#else
EPIGEMM_HOST_DEVICE double infinity() { return __builtin_huge_val(); }
EPIGEMM_HOST_DEVICE double not_a_number() { return __builtin_nan(""); }
#endif

// Declares the C library's function of that name, on the device CUDA's, for float and double.
#define EPIGEMM_LIBRARY(name)                                      \
  EPIGEMM_HOST_DEVICE float name(float x) { return ::name##f(x); } \
  EPIGEMM_HOST_DEVICE double name(double x) { return ::name(x); }
#define EPIGEMM_LIBRARY_2(name)                                                \
  EPIGEMM_HOST_DEVICE float name(float a, float b) { return ::name##f(a, b); } \
  EPIGEMM_HOST_DEVICE double name(double a, double b) { return ::name(a, b); }

// |x|
EPIGEMM_HOST_DEVICE float abs(float x) { return ::fabsf(x); }
EPIGEMM_HOST_DEVICE double abs(double x) { return ::fabs(x); }

// trunc, floor, ceil: to the integer towards zero, below, above
EPIGEMM_LIBRARY(trunc)
EPIGEMM_LIBRARY(floor)
EPIGEMM_LIBRARY(ceil)

// round(x): to the nearest integer, halves to the even one
EPIGEMM_HOST_DEVICE float round(float x) { return ::rintf(x); }
EPIGEMM_HOST_DEVICE double round(double x) { return ::rint(x); }

// |a| with the sign of b, that of a zero included
EPIGEMM_LIBRARY_2(copysign)

// fmod(a, b) = a - b trunc(a / b), exact, with a's sign
EPIGEMM_LIBRARY_2(fmod)

// The largest finite number of x's type
EPIGEMM_HOST_DEVICE float highest(float) { return 3.4028234663852886e+38f; }
EPIGEMM_HOST_DEVICE double highest(double) { return 1.7976931348623157e+308; }

#if defined(__CUDA_ARCH__)
// One instruction in place of the template's two comparisons in arithmetic.h; NaN if either is
EPIGEMM_HOST_DEVICE float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
EPIGEMM_HOST_DEVICE float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#endif

// The bits of a float, and the float of given bits.
#if defined(__CUDA_ARCH__)
EPIGEMM_HOST_DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
EPIGEMM_HOST_DEVICE float of_bits(unsigned bits) { return __uint_as_float(bits); }
#else
EPIGEMM_HOST_DEVICE unsigned bits_of(float x) { return detail::bit_cast<unsigned>(x); }
EPIGEMM_HOST_DEVICE float of_bits(unsigned bits) { return detail::bit_cast<float>(bits); }
#endif

// x rounded to bfloat16, ties to even; infinity beyond its largest number. A double is rounded to float first, as
// torch's casts do.
EPIGEMM_HOST_DEVICE float to_bfloat16(float x) {
  const unsigned bits = bits_of(x);
  return x != x ? x : of_bits((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}
EPIGEMM_HOST_DEVICE double to_bfloat16(double x) { return to_bfloat16(static_cast<float>(x)); }

// x rounded to fp32: a float itself
EPIGEMM_HOST_DEVICE float to_float(float x) { return x; }
EPIGEMM_HOST_DEVICE double to_float(double x) { return static_cast<float>(x); }

// x rounded to fp16, ties to even; from 65520 on infinity
#if defined(__CUDA_ARCH__)
EPIGEMM_HOST_DEVICE float to_half(float x) {
  float result;
  asm("{.reg .b16 half;\n cvt.rn.f16.f32 half, %1;\n cvt.f32.f16 %0, half;}" : "=f"(result) : "f"(x));
  return result;
}
#else
EPIGEMM_HOST_DEVICE float to_half(float x) {
  const float size = abs(x);
  if (!(size < 65520.0f)) return size == size ? copysign(static_cast<float>(infinity()), x) : x;
  // Adding this number and taking it away leaves the bits that fp16 holds: 10 behind the point of a normal number, and
  // multiples of 2^-24 below 2^-14.
  int exponent = -14;
  if (size >= 6.103515625e-05f) ::frexpf(size, &exponent), --exponent;
  const float shift = ::ldexpf(1.5f, exponent + 13);
  return copysign((size + shift) - shift, x);
}
#endif
EPIGEMM_HOST_DEVICE double to_half(double x) { return to_half(static_cast<float>(x)); }

}  // namespace epigemm::math
