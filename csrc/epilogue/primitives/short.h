// Functions of float in few instructions, for `Rounded`. A power of two behind a formula, as "2^-17.", is the largest
// relative error on the device. The host compiles them too, with its own exp2 and quotient, for tests with floats of
// every size.
#pragma once

#include "epilogue/primitives/special.h"

namespace epigemm::math::short_form {

// Added to a float, it leaves the nearest integer in the sum's lowest bits, for the sum's last bit counts ones.
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23

// a / b, sqrt(x) and 1 / sqrt(x), at most two units in the last place off.
#if defined(__CUDA_ARCH__)
EPIGEMM_HOST_DEVICE float div(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
EPIGEMM_HOST_DEVICE float sqrt(float x) {
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
EPIGEMM_HOST_DEVICE float reciprocal_root(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
#else
EPIGEMM_HOST_DEVICE float div(float a, float b) { return a / b; }
EPIGEMM_HOST_DEVICE float sqrt(float x) { return ::sqrtf(x); }
EPIGEMM_HOST_DEVICE float reciprocal_root(float x) { return 1.0f / ::sqrtf(x); }
#endif

// tanh(x) = 1 - 2 / (1 + exp(2 x)); near 0, where that subtracts, x + c x^3. 2^-17.
EPIGEMM_HOST_DEVICE float tanh(float x) {
  const float far = 1.0f - reciprocal_normal(0.5f + 0.5f * exp2_normal(x * 2.885390081777927f));
  const float near = x * (1.0f - x * x * 0.33243864f);
  return abs(x) < 0.09f ? near : far;
}

// expm1(x) = exp(x) - 1; near 0, where that subtracts, its series. 2^-17.
EPIGEMM_HOST_DEVICE float expm1(float x) {
  const float far = exp2_normal(x * 1.4426950408889634f) - 1.0f;
  const float near = x * (1.0f + x * (0.5f + x * (1.0f / 6.0f + x * (1.0f / 24.0f))));
  return abs(x) < 0.1f ? near : far;
}

// The logarithm to the base 2 in one instruction, between 1/2 and 2 at most 2^-22 off.
EPIGEMM_HOST_DEVICE float log2_normal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return ::log2f(x);
#endif
}

// log1p(x) = ln 2 log2(1 + x); near 0, where 1 + x loses x, its series. 2^-16. CUDA's function takes branches, and so
// many instructions that a GEMM's large tiles lose half of their rate behind them.
EPIGEMM_HOST_DEVICE float log1p(float x) {
  const float far = log2_normal(1.0f + x) * 0.6931471805599453f;
  const float near = x * (1.0f - x * (0.5f - x * (1.0f / 3.0f - x * 0.25f)));
  return abs(x) < 0.015625f ? near : far;
}

// log(1 + 2 v), also where 2 v overflows, for v >= 0; near 0 its series. 2^-18. NaN below -1/2.
EPIGEMM_HOST_DEVICE float log_of_one_and_twice(float v) {
  const float far = (log2_normal(0.5f + v) + 1.0f) * 0.6931471805599453f;
  const float x = v + v;
  const float near = x * (1.0f - x * (0.5f - x * (1.0f / 3.0f - x * (0.25f - x * (0.2f - x * (1.0f / 6.0f))))));
  return abs(x) < 0.125f ? near : far;
}

// asinh(x) = sign(x) log(1 + |x| + x^2 / (1 + sqrt(x^2 + 1))). 2^-18.
EPIGEMM_HOST_DEVICE float asinh(float x) {
  const float size = abs(x);
  const float root = size < 1e9f ? sqrt(size * size + 1.0f) : size;
  const float more = size * div(size, 1.0f + root);
  // Infinity over itself is NaN; x itself is as large.
  return copysign(log_of_one_and_twice(size < 1e9f ? 0.5f * (size + more) : size), x);
}

// acosh(x) = log(1 + t + sqrt(t (t + 2))), t = x - 1. 2^-18.
EPIGEMM_HOST_DEVICE float acosh(float x) {
  const float t = x - 1.0f;
  return log_of_one_and_twice(0.5f * t + 0.5f * (sqrt(t) * sqrt(x + 1.0f)));
}

// atanh(x) = sign(x) log(1 + 2 |x| / (1 - |x|)) / 2. 2^-18.
EPIGEMM_HOST_DEVICE float atanh(float x) {
  const float size = abs(x);
  return copysign(0.5f * log_of_one_and_twice(div(size, 1.0f - size)), x);
}

// hypot(a, b) = |a| sqrt(1 + (b / a)^2), |a| >= |b|. 2^-21.
EPIGEMM_HOST_DEVICE float hypot(float a, float b) {
  const float of_a = abs(a), of_b = abs(b);
  const float most = of_a > of_b ? of_a : of_b, least = of_a > of_b ? of_b : of_a;
  const float quotient = div(least, most);
  const float ratio = least == most ? 1.0f : quotient;  // of two zeros, of two infinities
  const float infinite = static_cast<float>(infinity());
  const float result = most * sqrt(1.0f + ratio * ratio);
  return (of_a == infinite) | (of_b == infinite) ? infinite : result;  // || would branch
}

// log2(x) of a positive x as e + log2(m), m within a third of 1, by the series of atanh in (m - 1) / (m + 1): right in
// its digits also near 1. 2^-21. Of 0 minus infinity, of infinity and NaN themselves.
EPIGEMM_HOST_DEVICE float log2_exact_at_one(float x) {
  constexpr unsigned kTwoThirds = 0x3f2aaaabu;
  const bool is_small = x < 1.17549435e-38f;
  const unsigned bits = bits_of(is_small ? x * 16777216.0f : x) - kTwoThirds;
  const float exponent = static_cast<float>(static_cast<int>(bits) >> 23) - (is_small ? 24.0f : 0.0f);
  const float m = of_bits((bits & 0x7fffffu) + kTwoThirds);
  const float s = (m - 1.0f) * reciprocal_normal(m + 1.0f), square = s * s;
  const float p = ((0.439153671f * square + 0.576391697f) * square + 0.961802244f) * square + 2.88539004f;
  const float result = s * p + exponent;
  const float at_end = x == 0.0f ? -static_cast<float>(infinity()) : x;
  const bool is_inside = (x > 0.0f) & (x < static_cast<float>(infinity()));  // && would branch
  return is_inside ? result : at_end;
}

// pow(a, b) = 2^(b log2 |a|), with the signs and the special values of C's. 2^-18 where fp16 has the result, 2^-15 at
// the ends of bf16's range. Subnormal results are zero.
EPIGEMM_HOST_DEVICE float pow(float a, float b) {
  const float size = abs(a), half = 0.5f * b, infinite = static_cast<float>(infinity());
  const bool is_whole = trunc(b) == b, is_odd = is_whole & (trunc(half) != half);
  float result = exp2_normal(b * log2_exact_at_one(size));
  result = (bits_of(a) >> 31 != 0u) & is_odd ? -result : result;
  result = (a < 0.0f) & !is_whole & (size < infinite) ? static_cast<float>(not_a_number()) : result;
  const bool is_one = (b == 0.0f) | (a == 1.0f) | ((size == 1.0f) & (abs(b) == infinite));
  return is_one ? 1.0f : result;
}

// gelu(x) = x Phi(x), where Phi(-|x|) = 2^p(|x|): the logarithm is smooth where erf has branches. p is minimax on
// [0, 6], fitted with a relative error of Phi of 2^-17.8, and falls beyond. So the negative tail keeps its digits,
// which 1 + erf loses. 2^-17 from -6 on; below, 2^-40 absolutely.
EPIGEMM_HOST_DEVICE float gelu(float x) {
  const float size = abs(x);
  float p = -1.79378014e-6f;
  p = p * size + 6.07261536e-5f;
  p = p * size - 9.23185726e-4f;
  p = p * size + 8.47684685e-3f;
  p = p * size - 5.38909398e-2f;
  p = p * size - 4.58541572e-1f;
  p = p * size - 1.15121436f;
  const float tail = exp2_normal(p * size - 1.0f);
  const float above = x > 0.0f ? 1.0f : 0.0f;
  return x * abs(above - tail);
}

// gelu_tanh(x) = x / (1 + 2^p), p = -2 log2(e) sqrt(2 / pi) (x + 0.044715 x^3). 2^-17 from -6 on; below, 2^-40
// absolutely.
EPIGEMM_HOST_DEVICE float gelu_tanh(float x) {
  const float p = x * (-2.302208198f - 0.1029432396f * (x * x));
  return x * reciprocal_normal(1.0f + exp2_normal(p));
}

}  // namespace epigemm::math::short_form
