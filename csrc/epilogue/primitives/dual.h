// The derivatives of the primitives: each function of a dual number is that of its value and, as torch's backward has
// it, of its slope. At kinks: abs'(0) = 0; maximum and minimum halve on ties; clamp's derivative at a bound is that of
// x. Where clamp's bounds are equal and x is below them, neither x nor a bound has a derivative.
#pragma once

#include "epilogue/dual.h"
#include "epilogue/primitives/arithmetic.h"

namespace epigemm::math {

// y = f(x), of slope f'(x)
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> chain(Dual<T> x, T y, T slope) {
  return {y, x.constant ? T(0) : x.derivative * slope, x.constant};
}

// y = f(a, b), of slopes df/da and df/db
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> chain(Dual<T> a, Dual<T> b, T y, T slope_a, T slope_b) {
  return combined(y, a, a.derivative * slope_a, b, b.derivative * slope_b);
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> without_derivative(T value) {
  return {value, T(0), true};
}

// Declares a function of one number. In `slope`, its derivative, x is the argument and y the result.
#define EPIGEMM_DERIVATIVE(name, slope)                \
  template <class T>                                   \
  EPIGEMM_HOST_DEVICE Dual<T> name(Dual<T> argument) { \
    const T x = argument.value;                        \
    const T y = name(x);                               \
    (void)x;                                           \
    return chain(argument, y, T(slope));               \
  }
#define EPIGEMM_NO_DERIVATIVE(name)             \
  template <class T>                            \
  EPIGEMM_HOST_DEVICE Dual<T> name(Dual<T> x) { \
    return without_derivative(name(x.value));   \
  }

EPIGEMM_NO_DERIVATIVE(sign)
EPIGEMM_NO_DERIVATIVE(trunc)
EPIGEMM_NO_DERIVATIVE(floor)
EPIGEMM_NO_DERIVATIVE(ceil)
EPIGEMM_NO_DERIVATIVE(round)
EPIGEMM_NO_DERIVATIVE(highest)
EPIGEMM_NO_DERIVATIVE(detach)
EPIGEMM_DERIVATIVE(to_float, 1)
EPIGEMM_DERIVATIVE(to_half, 1)
EPIGEMM_DERIVATIVE(to_bfloat16, 1)
EPIGEMM_DERIVATIVE(abs, sign(x))
EPIGEMM_DERIVATIVE(inverse, -(y* y))
EPIGEMM_DERIVATIVE(exp2, y* T(0.69314718055994530942))
EPIGEMM_DERIVATIVE(expm1, exp(x))  // y + 1 would cancel far left
EPIGEMM_DERIVATIVE(log, T(1) / x)
EPIGEMM_DERIVATIVE(log2, T(1) / (x * T(0.69314718055994530942)))
EPIGEMM_DERIVATIVE(log10, T(1) / (x * T(2.30258509299404568402)))
EPIGEMM_DERIVATIVE(log1p, T(1) / (x + T(1)))
EPIGEMM_DERIVATIVE(sqrt, T(1) / (T(2) * y))
EPIGEMM_DERIVATIVE(rsqrt, T(-0.5) * y * y * y)
EPIGEMM_DERIVATIVE(sin, cos(x))
EPIGEMM_DERIVATIVE(cos, -sin(x))
EPIGEMM_DERIVATIVE(tan, T(1) + y * y)
EPIGEMM_DERIVATIVE(asin, rsqrt(T(1) - x * x))
EPIGEMM_DERIVATIVE(acos, -rsqrt(T(1) - x * x))
EPIGEMM_DERIVATIVE(atan, T(1) / (x * x + T(1)))
EPIGEMM_DERIVATIVE(sinh, cosh(x))
EPIGEMM_DERIVATIVE(cosh, sinh(x))
EPIGEMM_DERIVATIVE(tanh, T(1) - y * y)
EPIGEMM_DERIVATIVE(asinh, rsqrt(x* x + T(1)))
EPIGEMM_DERIVATIVE(acosh, rsqrt(x* x - T(1)))
EPIGEMM_DERIVATIVE(atanh, T(1) / (T(1) - x * x))
EPIGEMM_DERIVATIVE(erf, T(1.12837916709551257390) * exp(-x * x))
EPIGEMM_DERIVATIVE(erfc, T(-1.12837916709551257390) * exp(-x * x))
EPIGEMM_DERIVATIVE(erfinv, T(0.88622692545275801365) * exp(y * y))
EPIGEMM_DERIVATIVE(lgamma, digamma(x))
EPIGEMM_DERIVATIVE(digamma, trigamma(x))
EPIGEMM_DERIVATIVE(i0, i1(x))
EPIGEMM_DERIVATIVE(sinc, x == T(0) ? T(0) : (cos(T(3.14159265358979323846) * x) - y) / x)

// These depend on the values alone.
template <class T>
EPIGEMM_HOST_DEVICE bool signbit(Dual<T> x) {
  return signbit(x.value);
}

// a with a sign that b gives: the slope is 0 where a is 0.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> copysign(Dual<T> a, Dual<T> b) {
  const T value = copysign(a.value, b.value);
  return chain(a, value, a.value == T(0) ? T(0) : value / a.value);
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> maximum(Dual<T> a, Dual<T> b) {
  if (a.value < b.value) return b;
  if (a.value > b.value) return a;
  const T part = a.value == b.value ? T(0.5) : T(1);  // NaN: torch passes to both
  return chain(a, b, maximum(a.value, b.value), part, part);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> minimum(Dual<T> a, Dual<T> b) {
  if (a.value < b.value) return a;
  if (a.value > b.value) return b;
  const T part = a.value == b.value ? T(0.5) : T(1);
  return chain(a, b, minimum(a.value, b.value), part, part);
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> clamp(Dual<T> x, Dual<T> low, Dual<T> high) {
  if (low.value > high.value) return high;
  if (x.value < low.value) return low.value < high.value ? low : without_derivative(low.value);
  if (x.value > high.value) return high;
  if (x.value >= low.value && x.value <= high.value) return x;
  return without_derivative(clamp(x.value, low.value, high.value));
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> clamp_min(Dual<T> x, Dual<T> low) {
  if (x.value < low.value) return low;
  return x.value >= low.value ? x : without_derivative(clamp_min(x.value, low.value));
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> clamp_max(Dual<T> x, Dual<T> high) {
  if (x.value > high.value) return high;
  return x.value <= high.value ? x : without_derivative(clamp_max(x.value, high.value));
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> fmod(Dual<T> a, Dual<T> b) {
  return chain(a, b, fmod(a.value, b.value), T(1), -trunc(a.value / b.value));
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> remainder(Dual<T> a, Dual<T> b) {
  return chain(a, b, remainder(a.value, b.value), T(1), -floor_div(a.value, b.value));
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> floor_div(Dual<T> a, Dual<T> b) {
  return without_derivative(floor_div(a.value, b.value));
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> trunc_div(Dual<T> a, Dual<T> b) {
  return without_derivative(trunc_div(a.value, b.value));
}

// At an exponent of 0 the slope by the base is 0, whatever the base; at the base 0 that by the exponent.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> pow(Dual<T> a, Dual<T> b) {
  const T value = pow(a.value, b.value);
  const T by_base = a.constant || b.value == T(0) ? T(0) : b.value * pow(a.value, b.value - T(1));
  const bool flat = b.constant || (a.value == T(0) && b.value >= T(0));
  return chain(a, b, value, by_base, flat ? T(0) : value * log(a.value));
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> atan2(Dual<T> a, Dual<T> b) {
  const T square = a.value * a.value + b.value * b.value;
  const T scale = a.value == T(0) && b.value == T(0) ? T(0) : T(1) / square;
  return chain(a, b, atan2(a.value, b.value), b.value * scale, -a.value * scale);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> hypot(Dual<T> a, Dual<T> b) {
  const T value = hypot(a.value, b.value);
  return chain(a, b, value, a.value / value, b.value / value);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> xlogy(Dual<T> a, Dual<T> b) {
  const T by_factor = a.value == T(0) && b.value <= T(0) ? T(0) : log(b.value);
  return chain(a, b, xlogy(a.value, b.value), by_factor, a.value / b.value);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> logaddexp(Dual<T> a, Dual<T> b) {
  const T more = b.value - a.value;
  return chain(a, b, logaddexp(a.value, b.value), T(1) / (T(1) + exp(more)), T(1) / (T(1) + exp(-more)));
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> logaddexp2(Dual<T> a, Dual<T> b) {
  const T more = b.value - a.value;
  return chain(a, b, logaddexp2(a.value, b.value), T(1) / (T(1) + exp2(more)), T(1) / (T(1) + exp2(-more)));
}

}  // namespace epigemm::math
