#pragma once

#include "epilogue/operands.h"
#include "epilogue/primitives.h"

namespace epigemm {

// D = tanh(acc + bias[n])
struct BiasTanh {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"));
  static constexpr const char* primitives = "tanh";

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias) {
    return math::tanh(acc + bias);
  }
};

}  // namespace epigemm
