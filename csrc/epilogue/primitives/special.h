// Error functions, gamma functions, Bessel functions of float and double. Where the C library has none, the host's are
// spelled out in fp64; the device has its own.
#pragma once

#include "epilogue/primitives/transcendental.h"

namespace epigemm::math {

EPIGEMM_LIBRARY(erf)     // 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x
EPIGEMM_LIBRARY(erfc)    // 1 - erf(x), exact far right
EPIGEMM_LIBRARY(lgamma)  // log |Gamma(x)|

#if defined(__CUDA_ARCH__)

EPIGEMM_LIBRARY(erfinv)
// NaN at the infinities, where torch's formula divides infinity by infinity.
EPIGEMM_HOST_DEVICE float i0(float x) { return ::cyl_bessel_i0f(x) + 0.0f * x; }
EPIGEMM_HOST_DEVICE double i0(double x) { return ::cyl_bessel_i0(x) + 0.0 * x; }
EPIGEMM_HOST_DEVICE float i1(float x) { return ::cyl_bessel_i1f(x) + 0.0f * x; }
EPIGEMM_HOST_DEVICE double i1(double x) { return ::cyl_bessel_i1(x) + 0.0 * x; }

#else

// erfinv(erf(x)) = x on (-1, 1); infinite at the ends, NaN beyond. An estimate (Winitzki 2008), then Halley's steps on
// the erfc of the nearer end, which keeps its digits where erf is close to 1.
EPIGEMM_HOST_DEVICE double erfinv(double y) {
  const double size = abs(y);
  if (!(size < 1.0)) return size == 1.0 ? y * infinity() : not_a_number();
  if (size < 1e-8) return y * 0.88622692545275801365;
  const double rest = 1.0 - size;
  const double logarithm = log(rest * (1.0 + size));
  const double half = 4.3307467508 + 0.5 * logarithm;
  double x = sqrt(sqrt(half * half - logarithm / 0.147) - half);
  for (int step = 0; step < 4; ++step) {
    const double error = size < 0.5 ? erf(x) - size : rest - erfc(x);
    const double newton = error / (1.12837916709551257390 * exp(-x * x));
    x -= newton / (1.0 + x * newton);
  }
  return copysign(x, y);
}
EPIGEMM_HOST_DEVICE float erfinv(float y) { return static_cast<float>(erfinv(static_cast<double>(y))); }

namespace detail {

// Modified Bessel functions of order 0 and 1 at x >= 0. Power series: sum of (x/2)^(2k+order) / (k! (k+order)!), all
// terms positive; from 30 on Hankel's expansion, whose terms fall below 1e-17 there.
EPIGEMM_HOST_DEVICE double bessel_i(int order, double x) {
  if (!(x < infinity())) return not_a_number();  // of infinity, too: torch's formula divides it by itself
  if (x < 30.0) {
    double term = order == 0 ? 1.0 : 0.5 * x, sum = term;
    for (int k = 1; k < 120; ++k) {
      term *= 0.25 * x * x / (double(k) * (k + order));
      sum += term;
    }
    return sum;
  }
  double term = 1.0, sum = 1.0;
  for (int k = 1; k < 30; ++k) {
    const double odd = 2.0 * k - 1.0;
    term *= (odd * odd - 4.0 * order) / (8.0 * x * k);
    sum += term;
  }
  // exp(x) in two halves: it overflows before the quotient does.
  const double root = ::exp(0.5 * x);
  return root / sqrt(6.28318530717958647693 * x) * sum * root;
}

}  // namespace detail

// i0(x), i1(x): modified Bessel functions of the first kind; i1 is the derivative of i0
EPIGEMM_HOST_DEVICE double i0(double x) { return detail::bessel_i(0, abs(x)); }
EPIGEMM_HOST_DEVICE float i0(float x) { return static_cast<float>(i0(static_cast<double>(x))); }
EPIGEMM_HOST_DEVICE double i1(double x) { return copysign(detail::bessel_i(1, abs(x)), x); }
EPIGEMM_HOST_DEVICE float i1(float x) { return static_cast<float>(i1(static_cast<double>(x))); }

#endif

namespace detail {

// tan(pi x) by the distance to the nearest integer, which is exact
EPIGEMM_HOST_DEVICE double fraction_around_zero(double x) { return x - round(x); }

}  // namespace detail

// digamma(x) = (log Gamma)'(x): reflected to the right half, carried up to 10, then the asymptotic series. At 0
// infinite against the sign of the zero, NaN at the other poles. In fp64 for floats too: it has zeros.
EPIGEMM_HOST_DEVICE double digamma(double x) {
  if (x == 0.0) return copysign(infinity(), -x);
  double sum = 0.0;
  if (x < 0.0) {
    const double fraction = detail::fraction_around_zero(x);
    if (fraction == 0.0 || x == -infinity()) return not_a_number();
    sum = -3.14159265358979323846 / tan(3.14159265358979323846 * fraction);
    x = 1.0 - x;
  }
  while (x < 10.0) {
    sum -= 1.0 / x;
    x += 1.0;
  }
  if (x == infinity()) return sum + x;
  const double z = 1.0 / (x * x);
  // Bernoulli numbers B(2k) / 2k; the first left out is 3e-17 at 10.
  const double tail =
      z * (1.0 / 12 - z * (1.0 / 120 -
                           z * (1.0 / 252 - z * (1.0 / 240 - z * (5.0 / 660 - z * (691.0 / 32760 - z * (1.0 / 12)))))));
  return sum + (log(x) - 0.5 / x - tail);
}
EPIGEMM_HOST_DEVICE float digamma(float x) { return static_cast<float>(digamma(static_cast<double>(x))); }

// trigamma(x) = digamma'(x); infinite at its poles
EPIGEMM_HOST_DEVICE double trigamma(double x) {
  double reflected = 0.0, sign = 1.0, sum = 0.0;
  if (x < 0.5) {
    const double sine = sin(3.14159265358979323846 * detail::fraction_around_zero(x));
    reflected = 9.86960440108935861883 / (sine * sine);
    sign = -1.0;
    x = 1.0 - x;
  }
  while (x < 12.0) {
    sum += 1.0 / (x * x);
    x += 1.0;
  }
  const double z = 1.0 / (x * x);
  // The Bernoulli numbers themselves; the first left out is 1e-16 at 12.
  const double tail =
      z * (1.0 / 6 - z * (1.0 / 30 - z * (1.0 / 42 - z * (1.0 / 30 - z * (5.0 / 66 - z * (691.0 / 2730))))));
  return reflected + sign * (sum + 1.0 / x + 0.5 * z + tail / x);
}
EPIGEMM_HOST_DEVICE float trigamma(float x) { return static_cast<float>(trigamma(static_cast<double>(x))); }

}  // namespace epigemm::math
