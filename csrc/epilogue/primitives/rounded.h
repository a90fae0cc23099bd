// The primitives for `Rounded` and `RoundedToBFloat16`, floats whose results will be rounded to fp16 and to bf16. They
// take fewer instructions where the error stays far below that rounding. It is at most 2^-16 of the result (pow at the
// ends of bf16's range: 2^-15), and 2^-10.9 in the functions for bf16 alone (EPIGEMM_BFLOAT16_SHORT below). A sum whose
// terms cancel makes an error larger. A functor that subtracts behind tanh, expm1, log1p or gelu therefore must not be
// called with these types. No functor in C++ does that; for Python functions epigemm/epilogues/tracer/accuracy.py
// chooses the type, by the errors given here, in short.h and in short_bfloat16.h.
#pragma once

#include "epilogue/rounded.h"
#include "epilogue/primitives/short_angles.h"
#include "epilogue/primitives/short_bfloat16.h"
#include "epilogue/primitives/short_quotients.h"

namespace epigemm::math {

#define EPIGEMM_ROUNDED_AS(name, function)                          \
  template <int Digits>                                             \
  EPIGEMM_HOST_DEVICE RoundedTo<Digits> name(RoundedTo<Digits> x) { \
    return RoundedTo<Digits>(function(x.value));                    \
  }
#define EPIGEMM_ROUNDED_2_AS(name, function)                                             \
  template <int Digits>                                                                  \
  EPIGEMM_HOST_DEVICE RoundedTo<Digits> name(RoundedTo<Digits> a, RoundedTo<Digits> b) { \
    return RoundedTo<Digits>(function(a.value, b.value));                                \
  }
#define EPIGEMM_ROUNDED(name) EPIGEMM_ROUNDED_AS(name, name)
#define EPIGEMM_ROUNDED_2(name) EPIGEMM_ROUNDED_2_AS(name, name)

EPIGEMM_ROUNDED(abs)
EPIGEMM_ROUNDED(trunc)
EPIGEMM_ROUNDED(floor)
EPIGEMM_ROUNDED(ceil)
EPIGEMM_ROUNDED(round)
EPIGEMM_ROUNDED(highest)
EPIGEMM_ROUNDED(to_float)
EPIGEMM_ROUNDED(to_half)
EPIGEMM_ROUNDED(to_bfloat16)
EPIGEMM_ROUNDED(log)
EPIGEMM_ROUNDED(log2)
EPIGEMM_ROUNDED(log10)
EPIGEMM_ROUNDED(asin)
EPIGEMM_ROUNDED(acos)
EPIGEMM_ROUNDED(atan)
EPIGEMM_ROUNDED(sinh)
EPIGEMM_ROUNDED(cosh)
EPIGEMM_ROUNDED(erf)
EPIGEMM_ROUNDED(erfc)
EPIGEMM_ROUNDED(erfinv)
EPIGEMM_ROUNDED(lgamma)
EPIGEMM_ROUNDED(digamma)
EPIGEMM_ROUNDED(i0)
EPIGEMM_ROUNDED_2(copysign)
EPIGEMM_ROUNDED_2(fmod)

#define EPIGEMM_ROUNDED_SHORT(name) EPIGEMM_ROUNDED_AS(name, short_form::name)
EPIGEMM_ROUNDED_SHORT(tanh)
EPIGEMM_ROUNDED_SHORT(expm1)
EPIGEMM_ROUNDED_SHORT(log1p)
EPIGEMM_ROUNDED_SHORT(gelu)
EPIGEMM_ROUNDED_SHORT(gelu_tanh)
EPIGEMM_ROUNDED_SHORT(sqrt)
EPIGEMM_ROUNDED_SHORT(asinh)
EPIGEMM_ROUNDED_SHORT(acosh)
EPIGEMM_ROUNDED_SHORT(atanh)
EPIGEMM_ROUNDED_SHORT(sin)
EPIGEMM_ROUNDED_SHORT(cos)
EPIGEMM_ROUNDED_SHORT(tan)

// The near forms: see short_angles.h and short_quotients.h.
#define EPIGEMM_ROUNDED_NEAR(name)                                                \
  template <int Digits>                                                           \
  EPIGEMM_HOST_DEVICE RoundedTo<Digits> name(RoundedTo<Digits> x, bool& is_far) { \
    return RoundedTo<Digits>(short_form::name(x.value, is_far));                  \
  }
EPIGEMM_ROUNDED_NEAR(sin)
EPIGEMM_ROUNDED_NEAR(cos)
EPIGEMM_ROUNDED_NEAR(tan)
#define EPIGEMM_ROUNDED_NEAR_2(name)                                                                   \
  template <int Digits>                                                                                \
  EPIGEMM_HOST_DEVICE RoundedTo<Digits> name(RoundedTo<Digits> a, RoundedTo<Digits> b, bool& is_far) { \
    return RoundedTo<Digits>(short_form::name(a.value, b.value, is_far));                              \
  }
EPIGEMM_ROUNDED_NEAR_2(fmod)
EPIGEMM_ROUNDED_NEAR_2(floor_div)

#define EPIGEMM_ROUNDED_SHORT_2(name) EPIGEMM_ROUNDED_2_AS(name, short_form::name)
EPIGEMM_ROUNDED_SHORT_2(div)
EPIGEMM_ROUNDED_SHORT_2(pow)
EPIGEMM_ROUNDED_SHORT_2(atan2)
EPIGEMM_ROUNDED_SHORT_2(hypot)

// The functions that are for bf16 alone.
#define EPIGEMM_BFLOAT16_SHORT(name)                                \
  EPIGEMM_HOST_DEVICE RoundedToBFloat16 name(RoundedToBFloat16 x) { \
    return RoundedToBFloat16(short_form::name##_bfloat16(x.value)); \
  }
EPIGEMM_BFLOAT16_SHORT(tanh)
EPIGEMM_BFLOAT16_SHORT(expm1)
EPIGEMM_BFLOAT16_SHORT(log1p)
EPIGEMM_BFLOAT16_SHORT(gelu)

#if defined(__CUDA_ARCH__)

// One instruction each, at most two units in the last place off.
#define EPIGEMM_ROUNDED_INSTRUCTION(name, instruction)              \
  template <int Digits>                                             \
  EPIGEMM_HOST_DEVICE RoundedTo<Digits> name(RoundedTo<Digits> x) { \
    float result;                                                   \
    asm(instruction " %0, %1;" : "=f"(result) : "f"(x.value));      \
    return RoundedTo<Digits>(result);                               \
  }
EPIGEMM_ROUNDED_INSTRUCTION(inverse, "rcp.approx.f32")
EPIGEMM_ROUNDED_INSTRUCTION(rsqrt, "rsqrt.approx.f32")
EPIGEMM_ROUNDED_INSTRUCTION(exp2, "ex2.approx.f32")

EPIGEMM_ROUNDED_2(maximum)
EPIGEMM_ROUNDED_2(minimum)

#else

EPIGEMM_ROUNDED(rsqrt)
EPIGEMM_ROUNDED(exp2)

#endif

}  // namespace epigemm::math
