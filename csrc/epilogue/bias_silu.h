#pragma once

#include "epilogue/operands.h"
#include "epilogue/primitives.h"

namespace epigemm {

// D = z sigmoid(z),  z = acc + bias[n]
struct BiasSiLU {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"));
  static constexpr const char* primitives = "sigmoid";

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias) {
    const T z = acc + bias;
    return z * math::sigmoid(z);
  }
};

}  // namespace epigemm
