#pragma once

#include "epilogue/math.h"
#include "epilogue/operands.h"

namespace epigemm {

// D = relu(acc + bias[n]) / divisor
struct ReLUDiv {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"), scalar("divisor"));

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias, T divisor) {
    return math::divide(math::relu(acc + bias), divisor);
  }
};

}  // namespace epigemm
