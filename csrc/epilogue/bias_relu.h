#pragma once

#include "epilogue/math.h"
#include "epilogue/operands.h"

namespace epigemm {

// D = relu(acc + bias[n])
struct BiasReLU {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"));

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias) {
    return math::relu(acc + bias);
  }
};

}  // namespace epigemm
