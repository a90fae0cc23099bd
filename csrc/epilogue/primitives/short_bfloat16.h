// Functions of float in still fewer instructions than short.h's, for results that are rounded to bf16: to 8 digits, so
// by up to 2^-8 of a result. Errors are given as in short.h.
#pragma once

#include "epilogue/primitives/short.h"

namespace epigemm::math::short_form {

// tanh(x) in one instruction. 2^-10.98 (PTX ISA, tanh.approx): with the rounding at most .63 units of bf16.
EPIGEMM_HOST_DEVICE float tanh_bfloat16(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return ::tanhf(x);
#endif
}

// gelu(x) as in short.h, by a polynomial that is two degrees shorter: minimax on [0, 6], where Phi(-|x|) is 2^-11.4
// off, and falling beyond. From -6 on with the rounding at most .61 units of bf16; below, 2^-38 absolutely, where
// PyTorch's formula in fp32 has 0.
EPIGEMM_HOST_DEVICE float gelu_bfloat16(float x) {
  const float size = abs(x);
  float p = -2.0167684e-4f;
  p = p * size + 4.467484e-3f;
  p = p * size - 4.283202e-2f;
  p = p * size - 4.727875e-1f;
  p = p * size - 1.1443979f;
  const float tail = exp2_normal(p * size - 1.0005324f);
  const float above = x > 0.0f ? 1.0f : 0.0f;
  return x * abs(above - tail);
}

// expm1(x) = exp(x) - 1; near 0, where that subtracts, x. 2^-11.3, at the change.
EPIGEMM_HOST_DEVICE float expm1_bfloat16(float x) {
  const float far = exp2_normal(x * 1.4426950408889634f) - 1.0f;
  return abs(x) < 7.7e-4f ? x : far;
}

// log1p(x) = ln 2 log2(1 + x); near 0, where 1 + x loses x, x. 2^-11.3, at the change.
EPIGEMM_HOST_DEVICE float log1p_bfloat16(float x) {
  const float far = log2_normal(1.0f + x) * 0.6931471805599453f;
  return abs(x) < 7.7e-4f ? x : far;
}

}  // namespace epigemm::math::short_form
