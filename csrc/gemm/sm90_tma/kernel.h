// The types of the large tiles' kernels, which multiply the operands themselves.
#pragma once

#include "gemm/sm90/grouped_mainloop.cuh"
#include "gemm/sm90/kernel.cuh"
#include "gemm/sm90/pair_mainloop.cuh"
#include "gemm/sm90_tma/tiles.h"

namespace epigemm::sm90_tma {

// The element types of a unit. TF32 reads fp32 memory as it is; the tensor cores ignore the low 13 mantissa bits.
namespace element {
using float16 = cutlass::half_t;
using bfloat16 = cutlass::bfloat16_t;
using tf32 = float;
}  // namespace element

template <class Element, int TileIndex>
struct Types : sm90::OneProduct<Element, kTiles[TileIndex].stages, kTiles[TileIndex].schedule> {
  using Operand = Element;
  using Output = Element;
  using Sums = sm90::PlainSums;
  static constexpr Tile tile = kTiles[TileIndex];
};

// Types for pairs of products, in 16 bits.
template <class Element, int TileIndex>
struct PairTypes : sm90::TwoProducts<Element, kPairTiles[TileIndex].stages, kPairTiles[TileIndex].schedule> {
  using Operand = Element;
  using Output = Element;
  using Sums = sm90::PlainSums;
  static constexpr Tile tile = kPairTiles[TileIndex];
};

// Types for rows in groups, in 16 bits. Weights: of a pair 2.
template <class Element, int Weights, int TileIndex, bool IsWeightTransposed>
struct GroupedTypes
    : sm90::GroupedProducts<Element, grouped_tile<Weights>(TileIndex).stages, grouped_tile<Weights>(TileIndex).schedule,
                            Weights, grouped_tile<Weights>(TileIndex).transposed, IsWeightTransposed> {
  using Operand = Element;
  using Output = Element;
  using Sums = sm90::PlainSums;
  static constexpr Tile tile = grouped_tile<Weights>(TileIndex);
};

}  // namespace epigemm::sm90_tma
