#pragma once

#include "epilogue/math.h"
#include "epilogue/operands.h"

namespace epigemm {

// D = z + scale * sigmoid(z),  z = acc + bias[n]
struct SigmoidScaleResidual {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"), scalar("scale"));
  static constexpr const char* primitives = "sigmoid";

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias, T scale) {
    const T z = acc + bias;
    return z + scale * math::sigmoid(z);
  }
};

}  // namespace epigemm
