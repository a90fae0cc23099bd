// Functions of float in few instructions, for `Rounded`. Each says how far it is off on the device, relatively. A host
// has them too, with its own exp2 and quotient: tests go through floats of every size there.
#pragma once

#include "epilogue/primitives/special.h"

namespace epigemm::math::short_form {

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
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
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
