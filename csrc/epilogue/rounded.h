// The arithmetic of a result that will be rounded to 16 bits: fp32, with the shortest instructions for what a functor
// calls from math.h. Include it before the functors, so that their calls find these. Kernels use it; a host has it for
// tests, without the errors of the GPU's instructions.
//
// On an H200 a multiprocessor can spend 28 instructions on a 16-bit element before it is slower than its memory, and
// every one of them keeps a thread longer from its next load. Their errors, of a few units in fp32's last place, are
// thousands of times below the half unit of the 16 bits that the result is rounded to.
#pragma once

#include "epilogue/math.h"

namespace epigemm {

// A float that will be rounded to 16 bits.
struct Rounded {
  float value;

  EPIGEMM_HOST_DEVICE explicit Rounded(double number) : value(static_cast<float>(number)) {}
  EPIGEMM_HOST_DEVICE explicit Rounded(float number) : value(number) {}
  EPIGEMM_HOST_DEVICE explicit Rounded(int number) : value(static_cast<float>(number)) {}
  EPIGEMM_HOST_DEVICE explicit operator float() const { return value; }
};

EPIGEMM_HOST_DEVICE Rounded operator+(Rounded a, Rounded b) { return Rounded(a.value + b.value); }
EPIGEMM_HOST_DEVICE Rounded operator-(Rounded a, Rounded b) { return Rounded(a.value - b.value); }
EPIGEMM_HOST_DEVICE Rounded operator*(Rounded a, Rounded b) { return Rounded(a.value * b.value); }
EPIGEMM_HOST_DEVICE Rounded operator-(Rounded a) { return Rounded(-a.value); }
EPIGEMM_HOST_DEVICE Rounded operator/(Rounded a, Rounded b) { return Rounded(a.value / b.value); }
EPIGEMM_HOST_DEVICE bool operator<(Rounded a, Rounded b) { return a.value < b.value; }
EPIGEMM_HOST_DEVICE bool operator>(Rounded a, Rounded b) { return a.value > b.value; }
EPIGEMM_HOST_DEVICE bool operator<=(Rounded a, Rounded b) { return a.value <= b.value; }
EPIGEMM_HOST_DEVICE bool operator>=(Rounded a, Rounded b) { return a.value >= b.value; }
EPIGEMM_HOST_DEVICE bool operator==(Rounded a, Rounded b) { return a.value == b.value; }
EPIGEMM_HOST_DEVICE bool operator!=(Rounded a, Rounded b) { return a.value != b.value; }

// Two instructions in place of eight. Rounding x log2(e) moves the argument by one unit in its last place, so the
// error grows with |x|: 2^-17 at the ends of the range. Subnormal results are zero.
EPIGEMM_HOST_DEVICE Rounded exp(Rounded x) { return Rounded(math::exp2_normal(x.value * 1.4426950408889634f)); }

EPIGEMM_HOST_DEVICE Rounded reciprocal_normal(Rounded x) { return Rounded(math::reciprocal_normal(x.value)); }

namespace math {

using epigemm::exp;  // defined outside, where the templates of math.h find it by its argument

#if defined(__CUDA_ARCH__)

// One instruction in place of a comparison and a selection; like them it keeps a NaN.
EPIGEMM_HOST_DEVICE Rounded relu(Rounded x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x.value));
  return Rounded(result);
}

// Without the Newton step: at most two units in fp32's last place off.
EPIGEMM_HOST_DEVICE Rounded divide(Rounded numerator, Rounded denominator) {
  return Rounded(numerator.value * reciprocal(denominator.value));
}

#endif

}  // namespace math
}  // namespace epigemm
