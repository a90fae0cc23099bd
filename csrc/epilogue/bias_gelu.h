#pragma once

#include "epilogue/operands.h"
#include "epilogue/primitives.h"

namespace epigemm {

// D = gelu(acc + bias[n]),  gelu(z) = z (1 + erf(z / sqrt(2))) / 2
struct BiasGELU {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"));
  static constexpr const char* primitives = "gelu";

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias) {
    return math::gelu(acc + bias);
  }
};

}  // namespace epigemm
