#pragma once

#include "epilogue/operands.h"

namespace epigemm::fp16_slices {

// z = acc * f * f,  f = root of x's row * root of the weight's row
//
// Takes the two rows' powers of two back out. Their product may leave fp32's range where the result does not: in two
// equal steps, each by the square root of the factor, nothing overflows before the result does, and every step is exact
// as long as the result is a normal number.
EPIGEMM_HOST_DEVICE float rescale(float root_a, float root_b, float acc) {
  const float factor = root_a * root_b;
  return (acc * factor) * factor;
}

}  // namespace epigemm::fp16_slices
