// Angles of float in few instructions, for `Rounded`. Errors are given as in short.h. Angles of more than 1e5 take a
// longer reduction, and a branch to it would keep the elements of a thread from being computed side by side. So each
// function has two forms. The near form has a second argument, which it sets to true if the angle is finite and beyond
// 1e5: its result then has no meaning. The other form branches, and is right for all angles. A kernel computes several
// elements in the near form, and all of them again in the other one if an angle was beyond (csrc/open/contract.h).
//
// Reduction (Cody and Waite 1980): a multiple n c of pi or pi/2 is subtracted in three steps, c = c1 + c2 + c3 with 24
// bits each. The first is exact up to |x| = 1e5 and the second rounds to a unit of what is left, so that a rest that is
// small beside x is right in all its digits, too. The parts are of one sign, so that -0 stays -0. Products are fused: a
// host's fmaf is the device's.
#pragma once

#include "epilogue/primitives/short.h"
#include "epilogue/warp.h"

namespace epigemm::math::short_form {

// Beyond this the subtraction is not exact; see rest_of_far.
constexpr float kFarthestAngle = 1e5f;

// An angle less n times pi, or for the tangent less n times pi / 2. odd: whether n is odd, in the bit of the sign.
struct Rest {
  float angle;
  unsigned odd;
};

// The rest of an angle x = m 2^e beyond 1e5. x / pi modulo 2 is computed as 64 bits, from those bits of 1 / pi that
// affect it (Payne and Hanek 1983), doubled for quotients by pi / 2; `turn` is added to it. The absolute error is
// 2^-38; NaN where x is not finite.
EPIGEMM_HOST_DEVICE Rest rest_of_far(float x, bool is_doubled, unsigned long long turn) {
  constexpr unsigned kWords[] = {0u,          0x517cc1b7u, 0x27220a94u, 0xfe13abe8u,
                                 0xfa9a6ee0u, 0x6db14accu, 0x9e21c820u};   // the integer's, then the fraction's
  const unsigned bits = bits_of(x), first = ((bits >> 23) & 255u) - 119u;  // exponents are from 143 on
  const unsigned shift = first & 31u;
  unsigned words[3];
  for (unsigned i = 0; i < 3; ++i) {  // selected, for a table would be memory
    words[i] = kWords[i];
    for (unsigned word = 1; word < 5; ++word) words[i] = first >> 5 >= word ? kWords[i + word] : words[i];
  }
  const unsigned long long high = (static_cast<unsigned long long>(words[0]) << 32) | words[1];
  const unsigned long long window = (high << shift) | (words[2] >> 1 >> (31u - shift));
  const unsigned long long product = window * ((bits & 0x7fffffu) | 0x800000u);
  const unsigned long long of_size = bits >> 31 != 0u ? 0ull - product : product;
  const unsigned long long quotient = (is_doubled ? of_size << 1 : of_size) + turn;
  const float unit = is_doubled ? 8.51530395e-20f : 1.70306079e-19f;  // pi / 2 and pi over 2^64
  const float angle = static_cast<float>(static_cast<long long>(quotient << 1)) * unit;
  return {angle + (x - x), static_cast<unsigned>((quotient + (1ull << 62)) >> 32) & 0x80000000u};
}

// Whether the subtraction is not exact. Infinity is beyond, and NaN is not: both have the rest NaN in either form.
EPIGEMM_HOST_DEVICE bool is_beyond(float x) { return abs(x) > kFarthestAngle; }

// `rest`, or that of rest_of_far beyond 1e5. Seldom is any thread of a warp there, and then none computes it.
EPIGEMM_HOST_DEVICE Rest also_far(Rest rest, float x, bool is_doubled, unsigned long long turn) {
  const bool is_far = is_beyond(x);
  if (any_of_warp(is_far)) {
    const Rest far = rest_of_far(x, is_doubled, turn);
    rest = {is_far ? far.angle : rest.angle, is_far ? far.odd : rest.odd};
  }
  return rest;
}

// x - n pi
EPIGEMM_HOST_DEVICE float less_pi(float x, float n) {
  return ::fmaf(n, -1.07806051e-14f, ::fmaf(n, -1.50995788e-07f, ::fmaf(n, -3.1415925f, x)));
}

// sin on [-pi/2, pi/2], minimax, 2^-20; the sign changed where n is odd.
EPIGEMM_HOST_DEVICE float sine_of(Rest rest) {
  const float square = rest.angle * rest.angle;
  float p = -0.00018488006f;
  p = ::fmaf(p, square, 0.00831189565f);
  p = ::fmaf(p, square, -0.16665554f);
  p = ::fmaf(p, square, 0.999999046f);
  return of_bits(bits_of(rest.angle * p) ^ rest.odd);
}

// The rest of x for the sine.
EPIGEMM_HOST_DEVICE Rest rest_for_sin(float x) {
  const float shifted = ::fmaf(x, 0.318309886f, kToInteger);
  return {less_pi(x, shifted - kToInteger), bits_of(shifted) << 31};
}

// sin(x). 2^-19 up to |x| = 1e5; beyond, 2^-19 absolutely.
EPIGEMM_HOST_DEVICE float sin(float x) { return sine_of(also_far(rest_for_sin(x), x, false, 0)); }
EPIGEMM_HOST_DEVICE float sin(float x, bool& is_far) {
  is_far |= is_beyond(x);
  return sine_of(rest_for_sin(x));
}

// The rest of x + pi/2: n pi is subtracted from it as (n - 1/2) pi from x.
EPIGEMM_HOST_DEVICE Rest rest_for_cos(float x) {
  const float shifted = ::fmaf(x, 0.318309886f, 0.5f) + kToInteger;
  return {less_pi(x, shifted - kToInteger - 0.5f), bits_of(shifted) << 31};
}

// cos(x) = sin(x + pi/2). As accurate.
EPIGEMM_HOST_DEVICE float cos(float x) { return sine_of(also_far(rest_for_cos(x), x, false, 1ull << 62)); }
EPIGEMM_HOST_DEVICE float cos(float x, bool& is_far) {
  is_far |= is_beyond(x);
  return sine_of(rest_for_cos(x));
}

// The rest of x for the tangent, by pi/2.
EPIGEMM_HOST_DEVICE Rest rest_for_tan(float x) {
  const float shifted = ::fmaf(x, 0.636619772f, kToInteger), n = shifted - kToInteger;
  const float angle = ::fmaf(n, -5.39030253e-15f, ::fmaf(n, -7.54978942e-08f, ::fmaf(n, -1.57079625f, x)));
  return {angle, bits_of(shifted) << 31};
}

// tan on [-pi/4, pi/4], minimax; -1 / tan of it where n is odd.
EPIGEMM_HOST_DEVICE float tangent_of(Rest rest) {
  const float square = rest.angle * rest.angle;
  float p = 0.020403333f;
  p = ::fmaf(p, square, 0.012509821f);
  p = ::fmaf(p, square, 0.0571933575f);
  p = ::fmaf(p, square, 0.132847339f);
  p = ::fmaf(p, square, 0.333359629f);
  p = ::fmaf(p, square, 0.999999762f);
  const float tangent = rest.angle * p, cotangent = -reciprocal_normal(tangent);
  return rest.odd != 0u ? cotangent : tangent;
}

// tan(x). 2^-19 up to |x| = 1e5; beyond, as of an angle that is off by 2^-32 of itself and 2^-37.
EPIGEMM_HOST_DEVICE float tan(float x) { return tangent_of(also_far(rest_for_tan(x), x, true, 0)); }
EPIGEMM_HOST_DEVICE float tan(float x, bool& is_far) {
  is_far |= is_beyond(x);
  return tangent_of(rest_for_tan(x));
}

// atan2(y, x), the angle of (x, y): atan of the lesser size over the greater, minimax, then by octants. 2^-18.
EPIGEMM_HOST_DEVICE float atan2(float y, float x) {
  const float of_y = abs(y), of_x = abs(x);
  const bool is_steep = of_y > of_x;
  const float least = is_steep ? of_x : of_y, most = is_steep ? of_y : of_x;
  // Of two zeros the quotient is 0, of two infinities 1.
  const float quotient = div(least, most), of_equal = most == 0.0f ? 0.0f : 1.0f;
  const float t = least == most ? of_equal : quotient;
  const float square = t * t;
  float p = 0.00786337629f;
  p = ::fmaf(p, square, -0.037012998f);
  p = ::fmaf(p, square, 0.0838711932f);
  p = ::fmaf(p, square, -0.134871915f);
  p = ::fmaf(p, square, 0.198814824f);
  p = ::fmaf(p, square, -0.333265156f);
  p = ::fmaf(p, square, 0.999999344f);
  float angle = t * p;
  angle = is_steep ? 1.57079633f - angle : angle;
  angle = bits_of(x) >> 31 ? 3.14159265f - angle : angle;
  return x == x && y == y ? copysign(angle, y) : x + y;
}

}  // namespace epigemm::math::short_form
