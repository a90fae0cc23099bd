// What an mma.sync kernel multiplies in a problem. Plain C++.
#pragma once

#include "gemm/problem.h"
#include "gemm/sm80_mma/tiles.h"

namespace epigemm::sm80_mma {

// Of a problem that the family computes.
inline Inputs inputs_of(const Problem& problem) {
  if (element_bytes(problem.x.element) == 2) return Inputs::Bits16;
  switch (problem.arithmetic) {
    case Arithmetic::Split:
      return Inputs::Split;
    case Arithmetic::Scaled:
      return Inputs::Scaled;
    default:
      return Inputs::TF32;
  }
}

inline const Tile& tile_of(const Problem& problem, int index) { return tile_of(inputs_of(problem), index); }

}  // namespace epigemm::sm80_mma
