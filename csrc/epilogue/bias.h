#pragma once

#include "epilogue/math.h"
#include "epilogue/operands.h"

namespace epigemm {

// D = acc + bias[n]
struct Bias {
  static constexpr auto operands = operand_list(accumulator(), per_column("bias"));

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T bias) {
    return acc + bias;
  }
};

}  // namespace epigemm
