// Remainders and whole quotients of float in few instructions, for `Rounded`. They are exact, as the library's are: the
// bits are the same. Each is a near form (see short_angles.h): `is_far` is set where the quotient is beyond 2^20 in
// size, or the divisor below 2^-126 or beyond 2^126. Then the library's loop is needed.
#pragma once

#include "epilogue/primitives/short.h"

namespace epigemm::math::short_form {

// |a| = whole |b| + rest with 0 <= rest < |b|, both exact.
struct Division {
  float whole, rest;
};

// The nearest integer n to the quotient is off by less than .7 of it: the reciprocal's error and two roundings move a
// quotient of at most 2^20 by .2. So |a| - n |b| lies within .7 |b|. It is a multiple of the lower of the last places
// of a and b, and no larger than either of them where |a| >= |b|: a float, which a fused operation computes exactly.
EPIGEMM_HOST_DEVICE Division divide_sizes(float a, float b, bool& is_far) {
  const float of_a = abs(a), of_b = abs(b);
  is_far |= (of_a > of_b * 1048576.0f) | (of_b < 1.17549435e-38f) | (of_b > 8.50705917e37f);
  const float shifted = ::fmaf(of_a, reciprocal_normal(of_b), kToInteger), n = shifted - kToInteger;
  const float signed_rest = ::fmaf(-n, of_b, of_a);
  const bool is_below = signed_rest < 0.0f, is_less = of_a < of_b;
  const float whole = is_below ? n - 1.0f : n, rest = is_below ? signed_rest + of_b : signed_rest;
  return {is_less ? 0.0f : whole, is_less ? of_a : rest};
}

// a - b trunc(a / b)
EPIGEMM_HOST_DEVICE float fmod(float a, float b, bool& is_far) { return copysign(divide_sizes(a, b, is_far).rest, a); }

// floor(a / b); a zero has the quotient's sign
EPIGEMM_HOST_DEVICE float floor_div(float a, float b, bool& is_far) {
  const Division division = divide_sizes(a, b, is_far);
  const unsigned sign = (bits_of(a) ^ bits_of(b)) & 0x80000000u;
  const float size = division.whole + ((sign != 0u) & (division.rest > 0.0f) ? 1.0f : 0.0f);
  return of_bits(bits_of(size) | sign);
}

}  // namespace epigemm::math::short_form
