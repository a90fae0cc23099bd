// The inverse of erf, gamma and Bessel functions of float in few instructions, for `Rounded`: without branches, for all
// arguments. Errors are given as in short.h; the polynomials are minimax of the relative error.
#pragma once

#include "epilogue/primitives/short.h"

namespace epigemm::math::short_form {

// log(x), also of subnormal numbers: at most 2^-22 off, or 2^-22 of itself where that is more.
#if defined(__CUDA_ARCH__)
EPIGEMM_HOST_DEVICE float log_of_any(float x) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result * 0.6931471805599453f;
}
#else
EPIGEMM_HOST_DEVICE float log_of_any(float x) { return log2_normal(x) * 0.6931471805599453f; }
#endif

// 1 / x, at most one unit in the last place off; beyond 2^126 it is zero. Where 4 x is subnormal, 1 / x is infinite.
EPIGEMM_HOST_DEVICE float reciprocal_of_any(float x) { return reciprocal_normal(x * 4.0f) * 4.0f; }

// erfinv(y) = y p(w), w = -log2(1 - y^2): smooth from y = 0 to the last number below 1, where w is 23. 2^-18.
EPIGEMM_HOST_DEVICE float erfinv(float y) {
  const float w = -6.0f - log2_normal(::fmaf(-y, y, 1.0f));
  float p = 1.77609108e-15f;  // positive: infinity at 1
  p = ::fmaf(p, w, -1.00630604e-13f);
  p = ::fmaf(p, w, 1.33164866e-12f);
  p = ::fmaf(p, w, 3.02739535e-11f);
  p = ::fmaf(p, w, -1.11737175e-09f);
  p = ::fmaf(p, w, 1.07130589e-08f);
  p = ::fmaf(p, w, 5.45021308e-08f);
  p = ::fmaf(p, w, -2.3613743e-06f);
  p = ::fmaf(p, w, 2.49353034e-05f);
  p = ::fmaf(p, w, -4.46360355e-05f);
  p = ::fmaf(p, w, -0.00350954803f);
  p = ::fmaf(p, w, 0.156685486f);
  p = ::fmaf(p, w, 1.89487994f);
  return y * p;
}

// i0(x): up to 6 a polynomial in x^2, beyond exp(|x|) / sqrt(|x|) times one in 1 / |x|. 2^-18 where fp16 has the
// result, 2^-17 at the end of bf16's range. The exponential is computed 2^16 times smaller, for it overflows before i0.
EPIGEMM_HOST_DEVICE float i0(float x) {
  const float size = abs(x), square = x * x;
  float near = 3.91297801e-12f;
  near = ::fmaf(near, square, 3.89611537e-10f);
  near = ::fmaf(near, square, 6.99466014e-08f);
  near = ::fmaf(near, square, 6.75243882e-06f);
  near = ::fmaf(near, square, 0.000434233109f);
  near = ::fmaf(near, square, 0.0156243434f);
  near = ::fmaf(near, square, 0.250000715f);
  near = ::fmaf(near, square, 0.999999881f);
  const float root = reciprocal_root(size), inverse = root * root;
  float far = 0.168458745f;
  far = ::fmaf(far, inverse, 0.00467416039f);
  far = ::fmaf(far, inverse, 0.0297653656f);
  far = ::fmaf(far, inverse, 0.0498279445f);
  far = ::fmaf(far, inverse, 0.398942441f);
  far = exp2_normal(::fmaf(size, 1.4426950408889634f, -16.0f)) * (far * root) * 65536.0f;
  return size < 6.0f ? near : far;
}

// x less the nearest integer, exactly, in the gamma functions' reflection.
EPIGEMM_HOST_DEVICE float from_integer(float x) { return x - round(x); }

// lgamma(x). Of sizes below 5/2, which 1 is added to below 1/2, (u - 1) (u - 2) p(u); beyond Stirling's series. Of
// negative numbers log(pi / |x sin(pi x)|) - lgamma(|x|). 2^-18; below -2, where this has zeros, of its larger term.
EPIGEMM_HOST_DEVICE float lgamma(float x) {
  const float size = abs(x), logarithm = log_of_any(size);
  const bool is_small = size < 0.5f;
  const float u = is_small ? size + 1.0f : size, v = u - 1.5f;
  float p = -0.00205094926f;
  p = ::fmaf(p, v, 0.00289264065f);
  p = ::fmaf(p, v, 0.00150452834f);
  p = ::fmaf(p, v, -0.00125779014f);
  p = ::fmaf(p, v, -0.00506465603f);
  p = ::fmaf(p, v, 0.00732821506f);
  p = ::fmaf(p, v, -0.0088317357f);
  p = ::fmaf(p, v, 0.0163181275f);
  p = ::fmaf(p, v, -0.0313880816f);
  p = ::fmaf(p, v, 0.0629548952f);
  p = ::fmaf(p, v, -0.145956889f);
  p = ::fmaf(p, v, 0.483128309f);
  const float near = ::fmaf((u - 1.0f) * (u - 2.0f), p, is_small ? -logarithm : 0.0f);
  const float inverse = reciprocal_normal(size);
  const float tail = ::fmaf(inverse, ::fmaf(inverse * inverse, -0.00259976485f, 0.0833229199f), 0.418938533f);
  const float far = ::fmaf(size - 0.5f, logarithm - 1.0f, tail);
  const float of_size = size < 2.5f ? near : far;
  const float rest = from_integer(x), square = rest * rest;
  float sine = 0.0775604174f;
  sine = ::fmaf(sine, square, -0.598242164f);
  sine = ::fmaf(sine, square, 2.55006981f);
  sine = ::fmaf(sine, square, -5.16770983f);
  sine = ::fmaf(sine, square, 3.14159274f);
  const float reflected = (1.14472989f - logarithm) - log_of_any(abs(rest) * sine) - of_size;
  const float of_negative = abs(rest) > 0.0f ? reflected : static_cast<float>(infinity());
  return x < 0.0f ? of_negative : of_size;
}

// digamma(x). With sizes below 1, which 1 is added to, (u - x0) p(u) up to 9/4, and beyond its asymptotic series; x0 is
// the zero. Of negative numbers digamma(1 - x) - pi cot(pi x). 2^-18; below 0, where it has zeros, of its larger term.
EPIGEMM_HOST_DEVICE float digamma(float x) {
  const float size = abs(x), inverse = reciprocal_of_any(x);
  const bool is_small = size < 1.0f, is_negative = x < 0.0f;
  const float u = is_small ? size + 1.0f : size, v = u - 1.5f;
  float p = 0.0127427299f;
  p = ::fmaf(p, v, -0.0330114923f);
  p = ::fmaf(p, v, 0.0452732444f);
  p = ::fmaf(p, v, -0.0611770153f);
  p = ::fmaf(p, v, 0.094118692f);
  p = ::fmaf(p, v, -0.148419157f);
  p = ::fmaf(p, v, 0.240593836f);
  p = ::fmaf(p, v, -0.423627973f);
  p = ::fmaf(p, v, 0.951055408f);
  const float near = ((u - 1.46163213f) - 1.24381499e-8f) * p;
  const float square = inverse * inverse, series = ::fmaf(square, -0.00736921746f, 0.0832708851f);
  const float far = log2_normal(size) * 0.6931471805599453f - ::fmaf(square, series, 0.5f * abs(inverse));
  const float of_size = u < 2.25f ? near : far;
  const float sum = of_size - (is_small != is_negative ? inverse : 0.0f);
  const float rest = from_integer(x), rest_square = rest * rest;
  float cotangent = 6.14575195f;
  cotangent = ::fmaf(cotangent, rest_square, 1.52345836f);
  cotangent = ::fmaf(cotangent, rest_square, 2.83561301f);
  cotangent = ::fmaf(cotangent, rest_square, 2.693712f);
  cotangent = ::fmaf(cotangent, rest_square, 2.8407433f);
  cotangent = ::fmaf(cotangent, rest_square, 3.99999928f);
  cotangent = cotangent * ::fmaf(-rest, rest, 0.25f);
  const float reflected = ::fmaf(-cotangent, reciprocal_of_any(rest), sum);
  const float of_negative = rest != 0.0f ? reflected : static_cast<float>(not_a_number());
  return is_negative ? of_negative : sum;
}

}  // namespace epigemm::math::short_form
