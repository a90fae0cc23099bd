// The derivative of every functor, for which the functor needs no code: `apply` is a template, and a dual number
// carries a value and its derivative through any arithmetic (Clifford 1873; forward-mode differentiation). Include it
// before the functors, so that their calls of math.h find the functions below.
#pragma once

#include "epilogue/math.h"
#include "epilogue/rounded.h"

namespace epigemm {

// `constant`: the number does not depend on the variable, so its term in a derivative is left out, which is not the
// same as 0: 0 * infinity and 0 / 0 are NaN. It costs nothing where the compiler knows it.
template <class T>
struct Dual {
  T value;
  T derivative;
  bool constant;

  EPIGEMM_HOST_DEVICE Dual(T value, T derivative, bool constant = false)
      : value(value), derivative(derivative), constant(constant) {}
  template <class Number>
  EPIGEMM_HOST_DEVICE explicit Dual(Number number) : value(T(number)), derivative(T(0)), constant(true) {}
};

// The dual number of an operation on a and b, given its value and the terms of a and of b in its derivative.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> combined(T value, Dual<T> a, T term_of_a, Dual<T> b, T term_of_b) {
  if (a.constant && b.constant) return {value, T(0), true};
  return {value, a.constant ? term_of_b : b.constant ? term_of_a : term_of_a + term_of_b};
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator+(Dual<T> a, Dual<T> b) {
  return combined(a.value + b.value, a, a.derivative, b, b.derivative);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator-(Dual<T> a, Dual<T> b) {
  return combined(a.value - b.value, a, a.derivative, b, -b.derivative);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator*(Dual<T> a, Dual<T> b) {
  return combined(a.value * b.value, a, a.derivative * b.value, b, a.value * b.derivative);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator/(Dual<T> a, Dual<T> b) {
  const T quotient = a.value / b.value;
  return combined(quotient, a, a.derivative / b.value, b, -(quotient * b.derivative) / b.value);
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator-(Dual<T> a) {
  return {-a.value, -a.derivative, a.constant};
}
template <class T>
EPIGEMM_HOST_DEVICE bool operator<(Dual<T> a, Dual<T> b) {
  return a.value < b.value;
}
template <class T>
EPIGEMM_HOST_DEVICE bool operator>(Dual<T> a, Dual<T> b) {
  return b < a;
}
template <class T>
EPIGEMM_HOST_DEVICE bool operator<=(Dual<T> a, Dual<T> b) {
  return a.value <= b.value;
}
template <class T>
EPIGEMM_HOST_DEVICE bool operator>=(Dual<T> a, Dual<T> b) {
  return b <= a;
}

template <class T>
EPIGEMM_HOST_DEVICE bool operator==(Dual<T> a, Dual<T> b) {
  return a.value == b.value;
}
template <class T>
EPIGEMM_HOST_DEVICE bool operator!=(Dual<T> a, Dual<T> b) {
  return !(a == b);
}

namespace math {

// relu'(0) = 0 and relu'(NaN) = 1, as in torch, whose backward pass applies the mask last: a masked gradient stays 0
// behind any division.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> relu(Dual<T> x) {
  const bool cut = x.value <= T(0);
  return {relu(x.value), cut ? T(0) : x.derivative, x.constant || cut};
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> exp(Dual<T> x) {
  const T value = exp(x.value);
  return {value, value * x.derivative, x.constant};
}

// s' = s (1 - s). Through exp and a reciprocal it would be 0 * infinity on the far left.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> sigmoid(Dual<T> x) {
  const T value = sigmoid(x.value);
  return {value, x.derivative * (value * (T(1) - value)), x.constant};
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> reciprocal_normal(Dual<T> x) {
  const T value = reciprocal_normal(x.value);
  return {value, -(value * value) * x.derivative, x.constant};
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> divide(Dual<T> numerator, Dual<T> denominator) {
  const T quotient = divide(numerator.value, denominator.value);
  return combined(quotient, numerator, divide(numerator.derivative, denominator.value), denominator,
                  divide(-(quotient * denominator.derivative), denominator.value));
}

}  // namespace math
}  // namespace epigemm
