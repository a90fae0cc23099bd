// Comparisons, extremes, quotients and remainders of float, double and Rounded, with the special values that PyTorch
// gives.
#pragma once

#include "epilogue/primitives/rounded.h"
#include "epilogue/primitives/special.h"

namespace epigemm::math {

// a / b and 1 / x, exact: infinity and NaN where IEEE has them
template <class T>
EPIGEMM_HOST_DEVICE T div(T a, T b) {
  return a / b;
}
template <class T>
EPIGEMM_HOST_DEVICE T inverse(T x) {
  return T(1) / x;
}

template <class T>
EPIGEMM_HOST_DEVICE bool isnan(T x) {
  return x != x;
}
template <class T>
EPIGEMM_HOST_DEVICE bool isinf(T x) {
  return (x == T(infinity())) | (x == T(-infinity()));  // || would branch
}
template <class T>
EPIGEMM_HOST_DEVICE bool isfinite(T x) {
  return !isnan(x) & !isinf(x);
}
// Whether the sign bit is set: that of -0 is
template <class T>
EPIGEMM_HOST_DEVICE bool signbit(T x) {
  return copysign(T(1), x) < T(0);
}

// sign(x) = 1, 0 or -1; of NaN 0
template <class T>
EPIGEMM_HOST_DEVICE T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0);
}

// The greater and the lesser of two; NaN if either is
template <class T>
EPIGEMM_HOST_DEVICE T maximum(T a, T b) {
  return isnan(a) || a > b ? a : b;
}
template <class T>
EPIGEMM_HOST_DEVICE T minimum(T a, T b) {
  return isnan(a) || a < b ? a : b;
}

// The same, but NaN only if both are
template <class T>
EPIGEMM_HOST_DEVICE T fmax(T a, T b) {
  return isnan(b) || a >= b ? a : b;
}
template <class T>
EPIGEMM_HOST_DEVICE T fmin(T a, T b) {
  return isnan(b) || a <= b ? a : b;
}

// clamp(x, low, high) = min(max(x, low), high); NaN if any of them is. x comes second: of two zeros it is the result,
// as in torch. (The device's fp32 instructions take +0 for the greater one, as torch's CUDA kernels did up to 2.13.)
template <class T>
EPIGEMM_HOST_DEVICE T clamp_min(T x, T low) {
  return maximum(low, x);
}
template <class T>
EPIGEMM_HOST_DEVICE T clamp_max(T x, T high) {
  return minimum(high, x);
}
template <class T>
EPIGEMM_HOST_DEVICE T clamp(T x, T low, T high) {
  return clamp_max(clamp_min(x, low), high);
}

// remainder(a, b) = a - b floor(a / b), with b's sign: Python's %. `Far`: nothing, or bool of the near form
// (short_quotients.h).
template <class T, class... Far>
EPIGEMM_HOST_DEVICE T remainder(T a, T b, Far&... is_far) {
  const T rest = fmod(a, b, is_far...);
  return rest != T(0) && (b < T(0)) != (rest < T(0)) ? rest + b : rest;
}

// floor(a / b), from the exact remainder: a / b itself may have been rounded up to an integer
template <class T>
EPIGEMM_HOST_DEVICE T floor_div(T a, T b) {
  const T quotient = div(a, b);
  if (b == T(0)) return quotient;
  const T rest = fmod(a, b);
  T whole = div(a - rest, b);
  if (rest != T(0) && (b < T(0)) != (rest < T(0))) whole = whole - T(1);
  if (whole == T(0)) return copysign(T(0), quotient);
  const T below = floor(whole);
  return whole - below > T(0.5) ? below + T(1) : below;
}
template <int Digits>
EPIGEMM_HOST_DEVICE RoundedTo<Digits> floor_div(RoundedTo<Digits> a, RoundedTo<Digits> b) {
  return RoundedTo<Digits>(floor_div(a.value, b.value));
}

// trunc(a / b)
template <class T>
EPIGEMM_HOST_DEVICE T trunc_div(T a, T b) {
  return trunc(div(a, b));
}

// heaviside(x, at_zero) = 0 below zero and of NaN, at_zero at zero, 1 above
template <class T>
EPIGEMM_HOST_DEVICE T heaviside(T x, T at_zero) {
  return x == T(0) ? at_zero : x > T(0) ? T(1) : T(0);
}

// condition ? chosen : other, of numbers or booleans
template <class T>
EPIGEMM_HOST_DEVICE T where(bool condition, T chosen, T other) {
  return condition ? chosen : other;
}

// x without a derivative
template <class T>
EPIGEMM_HOST_DEVICE T detach(T x) {
  return x;
}

// xlogy(a, b) = a log(b), 0 where a is 0 unless b is NaN
template <class T>
EPIGEMM_HOST_DEVICE T xlogy(T a, T b) {
  const T product = a * log(b);  // before the choice: no branch then
  return a == T(0) && !isnan(b) ? T(0) : product;
}

// logaddexp(a, b) = log(exp(a) + exp(b)), from the greater of them; of equal infinities that infinity
template <class T>
EPIGEMM_HOST_DEVICE T logaddexp(T a, T b) {
  const T sum = maximum(a, b) + log1p(exp(-abs(a - b)));
  return (a == b) & isinf(a) ? a : sum;
}

// logaddexp2(a, b) = log2(2^a + 2^b)
template <class T>
EPIGEMM_HOST_DEVICE T logaddexp2(T a, T b) {
  const T sum = maximum(a, b) + log1p(exp2(-abs(a - b))) * T(1.4426950408889634074);
  return (a == b) & isinf(a) ? a : sum;
}

// sinc(x) = sin(pi x) / (pi x), 1 at 0. `Far`: nothing, or bool of the near form (short_angles.h).
template <class T, class... Far>
EPIGEMM_HOST_DEVICE T sinc(T x, Far&... is_far) {
  const T angle = x * T(3.14159265358979323846);
  const T quotient = div(sin(angle, is_far...), angle);
  return x == T(0) ? T(1) : quotient;
}

}  // namespace epigemm::math
