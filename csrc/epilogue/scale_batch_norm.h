#pragma once

#include "epilogue/math.h"
#include "epilogue/operands.h"

namespace epigemm {

// D = multiplier[n] * acc + offset[n]
//
// A per-column scale followed by inference BatchNorm, folded to one multiply-add per element (elementwise/fold.h):
// multiplier = scale * g, offset = (bias * scale - mean) * g + beta, g = gamma / sqrt(variance + eps).
struct ScaleBatchNorm {
  static constexpr auto operands =
      operand_list(accumulator(), folded_per_column("multiplier"), folded_per_column("offset"));

  template <class T>
  EPIGEMM_HOST_DEVICE static T apply(T acc, T multiplier, T offset) {
    return multiplier * acc + offset;
  }
};

}  // namespace epigemm
