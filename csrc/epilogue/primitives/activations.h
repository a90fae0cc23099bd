// Activation functions, each once for float, double, Rounded and Dual<T>: they are made of the primitives before them.
// Include this behind rounded.h and dual.h, whose functions it calls.
#pragma once

#include "epilogue/primitives/dual.h"

namespace epigemm::math {

// gelu(x) = x (1 + erf(x / sqrt(2))) / 2
template <class T>
EPIGEMM_HOST_DEVICE T gelu(T x) {
  return x * T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
}

// gelu_tanh(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
template <class T>
EPIGEMM_HOST_DEVICE T gelu_tanh(T x) {
  return x * sigmoid(T(1.59576912160573071176) * (x + T(0.044715) * x * x * x));
}

// leaky_relu(x, slope) = x > 0 ? x : slope x
template <class T>
EPIGEMM_HOST_DEVICE T leaky_relu(T x, T slope) {
  return x > T(0) ? x : x * slope;
}

// elu(x) = x < 0 ? scale alpha (exp(input_scale x) - 1) : scale x
template <class T>
EPIGEMM_HOST_DEVICE T elu(T x, T alpha, T scale, T input_scale) {
  const T below = expm1(x * input_scale) * (alpha * scale);  // before the choice: no branch then
  return x < T(0) ? below : x * scale;
}
// Its slope at 0 is that from the left.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> elu(Dual<T> x, Dual<T> alpha, Dual<T> scale, Dual<T> input_scale) {
  const Dual<T> below = expm1(x * input_scale) * (alpha * scale), above = x * scale;
  Dual<T> result = x > Dual<T>(0) ? above : below;
  if (x.value == T(0)) result.value = above.value;
  return result;
}

// hardtanh(x) = clamp(x, low, high), whose slope on the bounds is 0
template <class T>
EPIGEMM_HOST_DEVICE T hardtanh(T x, T low, T high) {
  return clamp(x, low, high);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> hardtanh(Dual<T> x, Dual<T> low, Dual<T> high) {
  const bool on_bound = x.value == low.value || x.value == high.value;
  return on_bound ? without_derivative(x.value) : x.value < low.value ? low : x.value > high.value ? high : x;
}

// softplus(x) = log(1 + exp(beta x)) / beta, above the threshold of beta x x itself
template <class T>
EPIGEMM_HOST_DEVICE T softplus(T x, T beta, T threshold) {
  const T scaled = x * beta;
  const T below = div(log1p(exp(scaled)), beta);
  return scaled > threshold ? x : below;
}

// softshrink(x) = x > bound ? x - bound : x < -bound ? x + bound : 0, and NaN of NaN
template <class T>
EPIGEMM_HOST_DEVICE T softshrink(T x, T bound) {
  return x > bound ? x - bound : x < -bound ? x + bound : x * T(0);
}

}  // namespace epigemm::math
