// The derivative of every functor without another line in it: `apply` is a template, and a dual number carries a value
// and its derivative through any arithmetic (Clifford 1873; forward-mode differentiation). Include it before the
// functors, so that their calls of math.h find the functions below.
#pragma once

#include "epilogue/math.h"
#include "epilogue/rounded.h"

namespace epigemm {

template <class T>
struct Dual {
  T value;
  T derivative;

  EPIGEMM_HOST_DEVICE Dual(T value, T derivative) : value(value), derivative(derivative) {}
  template <class Number>
  EPIGEMM_HOST_DEVICE explicit Dual(Number constant) : value(T(constant)), derivative(T(0)) {}
};

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator+(Dual<T> a, Dual<T> b) {
  return {a.value + b.value, a.derivative + b.derivative};
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator-(Dual<T> a, Dual<T> b) {
  return {a.value - b.value, a.derivative - b.derivative};
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator*(Dual<T> a, Dual<T> b) {
  return {a.value * b.value, a.derivative * b.value + a.value * b.derivative};
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator/(Dual<T> a, Dual<T> b) {
  const T quotient = a.value / b.value;
  return {quotient, (a.derivative - quotient * b.derivative) / b.value};
}
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> operator-(Dual<T> a) {
  return {-a.value, -a.derivative};
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

namespace math {

// relu'(0) = 0 and relu'(NaN) = 1, as in torch.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> relu(Dual<T> x) {
  return {relu(x.value), x.value <= T(0) ? T(0) : x.derivative};
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> exp(Dual<T> x) {
  const T value = exp(x.value);
  return {value, value * x.derivative};
}

// s' = s (1 - s). Through exp and a reciprocal it would be 0 * infinity on the far left.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> sigmoid(Dual<T> x) {
  const T value = sigmoid(x.value);
  return {value, x.derivative * (value * (T(1) - value))};
}

template <class T>
EPIGEMM_HOST_DEVICE Dual<T> reciprocal_normal(Dual<T> x) {
  const T value = reciprocal_normal(x.value);
  return {value, -(value * value) * x.derivative};
}

// Divisors of epilogues are constants: what is left of the quotient rule is a division.
template <class T>
EPIGEMM_HOST_DEVICE Dual<T> divide(Dual<T> numerator, Dual<T> denominator) {
  const T quotient = divide(numerator.value, denominator.value);
  return {quotient, divide(numerator.derivative - quotient * denominator.derivative, denominator.value)};
}

}  // namespace math
}  // namespace epigemm
