// The arithmetic of a result that will be rounded to 16 bits: fp32, with the shortest instructions for what a functor
// calls from math.h. Include it before the functors, so that their calls find these. Kernels use it; a host has it for
// tests, without the errors of the GPU's instructions.
//
// On an H200 a multiprocessor can spend 28 instructions on a 16-bit element before it is slower than its memory, and
// every one of them keeps a thread longer from its next load. Behind a product every one of them counts, for at short K
// the tensor cores wait for the functor. The functions here are some units in fp32's last place off, which is thousands
// of times less than the rounding of the result to 16 bits. primitives/rounded.h has less exact ones.
#pragma once

#include "epilogue/math.h"

namespace epigemm {

// A float that will be rounded to a number of so many digits: 11 of fp16, 8 of bf16.
template <int Digits>
struct RoundedTo {
  float value;

  EPIGEMM_HOST_DEVICE explicit RoundedTo(double number) : value(static_cast<float>(number)) {}
  EPIGEMM_HOST_DEVICE explicit RoundedTo(float number) : value(number) {}
  EPIGEMM_HOST_DEVICE explicit RoundedTo(int number) : value(static_cast<float>(number)) {}
  EPIGEMM_HOST_DEVICE explicit operator float() const { return value; }
};

using Rounded = RoundedTo<11>;  // good enough for bf16, too
using RoundedToBFloat16 = RoundedTo<8>;

#define EPIGEMM_ROUNDED_OPERATOR(sign)                                                            \
  template <int Digits>                                                                           \
  EPIGEMM_HOST_DEVICE RoundedTo<Digits> operator sign(RoundedTo<Digits> a, RoundedTo<Digits> b) { \
    return RoundedTo<Digits>(a.value sign b.value);                                               \
  }
EPIGEMM_ROUNDED_OPERATOR(+)
EPIGEMM_ROUNDED_OPERATOR(-)
EPIGEMM_ROUNDED_OPERATOR(*)
EPIGEMM_ROUNDED_OPERATOR(/)
#undef EPIGEMM_ROUNDED_OPERATOR

template <int Digits>
EPIGEMM_HOST_DEVICE RoundedTo<Digits> operator-(RoundedTo<Digits> a) {
  return RoundedTo<Digits>(-a.value);
}

#define EPIGEMM_ROUNDED_COMPARISON(sign)                                             \
  template <int Digits>                                                              \
  EPIGEMM_HOST_DEVICE bool operator sign(RoundedTo<Digits> a, RoundedTo<Digits> b) { \
    return a.value sign b.value;                                                     \
  }
EPIGEMM_ROUNDED_COMPARISON(<)
EPIGEMM_ROUNDED_COMPARISON(>)
EPIGEMM_ROUNDED_COMPARISON(<=)
EPIGEMM_ROUNDED_COMPARISON(>=)
EPIGEMM_ROUNDED_COMPARISON(==)
EPIGEMM_ROUNDED_COMPARISON(!=)
#undef EPIGEMM_ROUNDED_COMPARISON

// Two instructions in place of eight. Rounding x log2(e) moves the argument by one unit in its last place, so the
// error grows with |x|: 2^-17 at the ends of the range. Subnormal results are zero.
template <int Digits>
EPIGEMM_HOST_DEVICE RoundedTo<Digits> exp(RoundedTo<Digits> x) {
  return RoundedTo<Digits>(math::exp2_normal(x.value * 1.4426950408889634f));
}

template <int Digits>
EPIGEMM_HOST_DEVICE RoundedTo<Digits> reciprocal_normal(RoundedTo<Digits> x) {
  return RoundedTo<Digits>(math::reciprocal_normal(x.value));
}

namespace math {

using epigemm::exp;  // defined outside, where the templates of math.h find it by its argument

#if defined(__CUDA_ARCH__)

// One instruction in place of a comparison and a selection; like them it keeps a NaN.
template <int Digits>
EPIGEMM_HOST_DEVICE RoundedTo<Digits> relu(RoundedTo<Digits> x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x.value));
  return RoundedTo<Digits>(result);
}

// Without the Newton step: at most two units in fp32's last place off.
template <int Digits>
EPIGEMM_HOST_DEVICE RoundedTo<Digits> divide(RoundedTo<Digits> numerator, RoundedTo<Digits> denominator) {
  return RoundedTo<Digits>(numerator.value * reciprocal(denominator.value));
}

#endif

}  // namespace math
}  // namespace epigemm
