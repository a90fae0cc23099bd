#pragma once

#include "epilogue/operands.h"
#include "epilogue/primitives.h"

namespace epigemm {

// D = gelu_tanh(acc + bias[n]),  gelu_tanh(z) = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2
struct BiasGELUTanh {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"));
  static constexpr const char* primitives = "gelu_tanh";

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias) {
    return math::gelu_tanh(acc + bias);
  }
};

}  // namespace epigemm
