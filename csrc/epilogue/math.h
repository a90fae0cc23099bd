// The few functions that epilogues are made of, for float and double, on host and device.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#include <cstring>
#endif

#include "epilogue/operands.h"

namespace epigemm::math {

// relu(x) = max(x, 0); a NaN stays a NaN, as in torch (a plain max would return 0).
template <class T>
EPIGEMM_HOST_DEVICE T relu(T x) {
  return x < T(0) ? T(0) : x;
}

#if !defined(__CUDA_ARCH__)

namespace detail {

template <class To, class From>
EPIGEMM_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// 2^n for n in the normal range, by writing the exponent field.
EPIGEMM_HOST_DEVICE float exp2_integer(int32_t n) { return bit_cast<float>((n + 127) << 23); }
EPIGEMM_HOST_DEVICE double exp2_integer(int64_t n) { return bit_cast<double>((n + 1023) << 52); }

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Integer = int32_t;
  static constexpr float lowest = -104.0f, highest = 89.0f;  // beyond: 0 and inf
  static constexpr float round_to_integer = 12582912.0f;     // 1.5 * 2^23
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  // Minimax on [-ln2/2, ln2/2] (Cephes expf); below one unit in the last place with the exact scaling.
  static constexpr float coefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

template <>
struct ExpConstants<double> {
  using Integer = int64_t;
  static constexpr double lowest = -746.0, highest = 710.0;
  static constexpr double round_to_integer = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  // Taylor: the first term left out is (ln2/2)^14/14! = 4e-18.
  static constexpr double coefficients[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                            1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                            1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
};

}  // namespace detail

// Without branches or calls, so that the compiler vectorises loops over it (the C library's exp it cannot, short of
// -ffast-math, which would give up NaN and infinity).
template <class T>
EPIGEMM_HOST_DEVICE T exp(T x) {
  using Constants = detail::ExpConstants<T>;
  using Integer = typename Constants::Integer;
  x = x < Constants::lowest ? Constants::lowest : x;
  x = x > Constants::highest ? Constants::highest : x;
  const T shifted = x * T(1.4426950408889634074) + Constants::round_to_integer;
  const T n = shifted - Constants::round_to_integer;
  const T r = (x - n * Constants::ln2_high) - n * Constants::ln2_low;
  T polynomial = Constants::coefficients[0];
  for (std::size_t i = 1; i < sizeof(Constants::coefficients) / sizeof(T); ++i) {
    polynomial = polynomial * r + Constants::coefficients[i];
  }
  polynomial = polynomial * (r * r) + r + T(1);
  // Two factors, because 2^n itself leaves the normal range where the result is subnormal or overflows.
  const Integer exponent = detail::bit_cast<Integer>(shifted) - detail::bit_cast<Integer>(Constants::round_to_integer);
  const Integer half = exponent >> 1;
  return polynomial * detail::exp2_integer(half) * detail::exp2_integer(exponent - half);
}

template <class T>
EPIGEMM_HOST_DEVICE T reciprocal_normal(T x) {
  return T(1) / x;
}

EPIGEMM_HOST_DEVICE float exp2_normal(float x) { return __builtin_exp2f(x); }

template <class T>
EPIGEMM_HOST_DEVICE T divide(T numerator, T denominator) {
  return numerator / denominator;
}

#else

__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ double exp(double x) { return ::exp(x); }

// At most 1 ulp off, subnormal results included.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

// The same in one instruction, for |x| below 2^126, where the result is not subnormal. The exact division would add a
// slow-path branch per element to every epilogue with a sigmoid.
__device__ __forceinline__ float reciprocal_normal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double reciprocal_normal(double x) { return 1.0 / x; }

// 2^x in one instruction, at most 2 ulp off; subnormal results are zero.
__device__ __forceinline__ float exp2_normal(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// One Newton step on numerator * (1 / denominator) (Markstein 1990): within 0.5 ulp and a hair for normal quotients.
// The denominator of an epilogue is the same for every element, so its reciprocal is computed once and a quotient costs
// five instructions without a branch. Where an infinity or a zero makes the corrected value NaN, the plain product is
// right. Denominators below 2^-128, whose reciprocal overflows, act as zero: as when torch divides by a number on CUDA.
__device__ __forceinline__ float divide(float numerator, float denominator) {
  const float inverse = reciprocal(denominator);
  const float quotient = numerator * inverse;
  const float remainder = fmaf(-quotient, denominator, numerator);
  const float corrected = fmaf(remainder, inverse, quotient);
  return corrected == corrected ? corrected : quotient;
}
__device__ __forceinline__ double divide(double numerator, double denominator) { return numerator / denominator; }

#endif

// sigmoid(x) = 1 / (1 + exp(-x)); exp overflows to infinity on the far left, which gives the right limit, 0. The
// quarters cancel exactly: they keep the reciprocal out of the subnormal range, the product then rounds into it.
template <class T>
EPIGEMM_HOST_DEVICE T sigmoid(T x) {
  const T quarter = T(0.25);
  return quarter * reciprocal_normal(quarter * exp(-x) + quarter);
}

}  // namespace epigemm::math
