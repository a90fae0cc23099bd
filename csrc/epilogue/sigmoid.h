#pragma once

#include "epilogue/math.h"
#include "epilogue/operands.h"

namespace epigemm {

// D = sigmoid(acc)
struct Sigmoid {
  static constexpr auto operands = operand_list(accumulator());

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc) {
    return math::sigmoid(acc);
  }
};

}  // namespace epigemm
