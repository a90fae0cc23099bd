// Angles of float in few instructions, for `Rounded`: without the slow path of CUDA's functions, whose branches keep
// the elements of a thread from being computed side by side. short.h says how errors are meant.
//
// Reduction (Cody and Waite 1980): a multiple n c of pi or pi/2 is subtracted in three steps, c = c1 + c2 + c3 with 24
// bits each. The first is exact up to |x| = 1e5 and the second rounds to a unit of what is left, so that also what is
// small beside x is right in all its digits. The parts are of one sign, so that -0 stays -0. Products are fused: a
// host's fmaf is the device's.
#pragma once

#include "epilogue/primitives/short.h"

namespace epigemm::math::short_form {

// Beyond, x is reduced by the accurate function's slow path.
constexpr float kFarthestAngle = 1e5f;

// Whether a thread of the warp says so, of those that are there: a branch on it splits no warp. On a host: the
// argument.
EPIGEMM_HOST_DEVICE bool any_of_warp(bool is_so) {
#if defined(__CUDA_ARCH__)
  return __any_sync(__activemask(), is_so);
#else
  return is_so;
#endif
}

// The nearest integer, plus a number whose last bit counts ones: the integer's lowest bits are the sum's.
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23

// x - n pi
EPIGEMM_HOST_DEVICE float less_pi(float x, float n) {
  return ::fmaf(n, -1.07806051e-14f, ::fmaf(n, -1.50995788e-07f, ::fmaf(n, -3.1415925f, x)));
}

// sin(r) on [-pi/2, pi/2], with the sign changed where n, which `shifted` holds, is odd. Minimax, 2^-20.
EPIGEMM_HOST_DEVICE float sine_of_rest(float r, float shifted) {
  const float square = r * r;
  float p = -0.00018488006f;
  p = ::fmaf(p, square, 0.00831189565f);
  p = ::fmaf(p, square, -0.16665554f);
  p = ::fmaf(p, square, 0.999999046f);
  return of_bits(bits_of(r * p) ^ (bits_of(shifted) << 31));
}

// sin(x), 2^-19 up to |x| = 1e5.
EPIGEMM_HOST_DEVICE float sin(float x) {
  const float shifted = ::fmaf(x, 0.318309886f, kToInteger);
  float result = sine_of_rest(less_pi(x, shifted - kToInteger), shifted);
  const bool is_far = !(abs(x) <= kFarthestAngle);  // or NaN
  if (any_of_warp(is_far)) result = is_far ? ::sinf(x) : result;
  return result;
}

// cos(x) = sin(x + pi/2), of which n pi is subtracted as (n - 1/2) pi of x. 2^-19 up to |x| = 1e5.
EPIGEMM_HOST_DEVICE float cos(float x) {
  const float shifted = ::fmaf(x, 0.318309886f, 0.5f) + kToInteger;
  float result = sine_of_rest(less_pi(x, shifted - kToInteger - 0.5f), shifted);
  const bool is_far = !(abs(x) <= kFarthestAngle);
  if (any_of_warp(is_far)) result = is_far ? ::cosf(x) : result;
  return result;
}

// tan(x): on [-pi/4, pi/4] minimax, and -1 / tan of it where n is odd. 2^-19 up to |x| = 1e5.
EPIGEMM_HOST_DEVICE float tan(float x) {
  const float shifted = ::fmaf(x, 0.636619772f, kToInteger), n = shifted - kToInteger;
  const float r = ::fmaf(n, -5.39030253e-15f, ::fmaf(n, -7.54978942e-08f, ::fmaf(n, -1.57079625f, x)));
  const float square = r * r;
  float p = 0.020403333f;
  p = ::fmaf(p, square, 0.012509821f);
  p = ::fmaf(p, square, 0.0571933575f);
  p = ::fmaf(p, square, 0.132847339f);
  p = ::fmaf(p, square, 0.333359629f);
  p = ::fmaf(p, square, 0.999999762f);
  const float tangent = r * p;
  float result = bits_of(shifted) & 1u ? -reciprocal_normal(tangent) : tangent;
  const bool is_far = !(abs(x) <= kFarthestAngle);
  if (any_of_warp(is_far)) result = is_far ? ::tanf(x) : result;
  return result;
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
