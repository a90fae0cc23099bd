// Exponentials, logarithms, powers, trigonometric and hyperbolic functions of float and double: the C library's, on the
// device CUDA's, none of them an approximation beyond a few units in the last place. `exp` and `sigmoid` are in math.h.
#pragma once

#include "epilogue/primitives/library.h"

namespace epigemm::math {

EPIGEMM_LIBRARY(exp2)   // 2^x
EPIGEMM_LIBRARY(expm1)  // exp(x) - 1, exact near 0
EPIGEMM_LIBRARY(log)
EPIGEMM_LIBRARY(log2)
EPIGEMM_LIBRARY(log10)
EPIGEMM_LIBRARY(log1p)  // log(1 + x), exact near 0
EPIGEMM_LIBRARY(sqrt)
EPIGEMM_LIBRARY(sin)
EPIGEMM_LIBRARY(cos)
EPIGEMM_LIBRARY(tan)
EPIGEMM_LIBRARY(asin)
EPIGEMM_LIBRARY(acos)
EPIGEMM_LIBRARY(atan)
EPIGEMM_LIBRARY(sinh)
EPIGEMM_LIBRARY(cosh)
EPIGEMM_LIBRARY(tanh)
EPIGEMM_LIBRARY(asinh)
EPIGEMM_LIBRARY(acosh)
EPIGEMM_LIBRARY(atanh)
EPIGEMM_LIBRARY_2(pow)    // a^b
EPIGEMM_LIBRARY_2(atan2)  // the angle of (b, a)
EPIGEMM_LIBRARY_2(hypot)  // sqrt(a^2 + b^2) without overflow on the way

// 1 / sqrt(x); infinity at 0
#if defined(__CUDA_ARCH__)
EPIGEMM_HOST_DEVICE float rsqrt(float x) { return ::rsqrtf(x); }
EPIGEMM_HOST_DEVICE double rsqrt(double x) { return ::rsqrt(x); }
#else
EPIGEMM_HOST_DEVICE float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
EPIGEMM_HOST_DEVICE double rsqrt(double x) { return 1.0 / ::sqrt(x); }
#endif

}  // namespace epigemm::math
