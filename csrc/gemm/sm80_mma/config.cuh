// The types of an mma.sync kernel: by what is multiplied, and by the tile.
#pragma once

#include <algorithm>

#include "cute/arch/copy_sm75.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "device/types.cuh"
#include "gemm/sm80_mma/loads.cuh"

namespace epigemm::sm80_mma {

// Names of the operands in fp16 slices.
struct Split;
struct Scaled;

// What is multiplied, the element as the tensor cores multiply it, the instruction, and the results. Sums are fp32.
template <class Operand>
struct Multiplied;
template <>
struct Multiplied<__half> {
  static constexpr Inputs inputs = Inputs::Bits16;
  using Element = cutlass::half_t;
  using Instruction = cute::SM80_16x8x16_F32F16F16F32_TN;
  using Result = __half;
};
template <>
struct Multiplied<__nv_bfloat16> {
  static constexpr Inputs inputs = Inputs::Bits16;
  using Element = cutlass::bfloat16_t;
  using Instruction = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  using Result = __nv_bfloat16;
};
template <>
struct Multiplied<float> {
  static constexpr Inputs inputs = Inputs::TF32;
  using Element = cutlass::tfloat32_t;
  using Instruction = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  using Result = float;
};
template <>
struct Multiplied<Scaled> {
  static constexpr Inputs inputs = Inputs::Scaled;
  using Element = cutlass::half_t;
  using Instruction = cute::SM80_16x8x16_F32F16F16F32_TN;
  using Result = float;
};
template <>
struct Multiplied<Split> : Multiplied<Scaled> {
  static constexpr Inputs inputs = Inputs::Split;
};

// The order of an operand's rows in shared memory: `row` of a place. It is linear in the bits of the place.
struct AsInMemory {
  static constexpr __host__ __device__ int row(int place) { return place; }
};

// The order of the weight's rows, which are columns of D. Of every eight columns mma.sync gives a thread two
// neighbours. In this order the pairs of several instructions are neighbours in D, too: together kVector of them.
// `kWarps`: side by side along D's columns, which take turns. `kTurns`: of a warp.
template <int kWarps, int kTurns, int kVector>
struct ForNeighbours {
  static constexpr int kPairs = kVector / 2;
  static_assert(kTurns % kPairs == 0, "a warp's columns are whole vectors of its threads");

  static constexpr __host__ __device__ int row(int place) {
    const int of_pair = place % 2, thread = place / 2 % 4, warp = place / 8 % kWarps, turn = place / 8 / kWarps;
    const int vector = (warp * kTurns + turn) / kPairs * 4 + thread;
    return vector * kVector + turn % kPairs * 2 + of_pair;
  }
};

template <class Operand, int TileIndex>
struct TileOf {
  static constexpr Tile tile = tile_of(Multiplied<Operand>::inputs, TileIndex);
};

template <class Operand, int TileIndex>
struct Config {
  static constexpr Inputs inputs = Multiplied<Operand>::inputs;
  using Element = typename Multiplied<Operand>::Element;
  using Result = typename Multiplied<Operand>::Result;
  using OfTile = TileOf<Operand, TileIndex>;
  static constexpr Tile tile = OfTile::tile;
  // Neighbours of a row of D that a thread finishes: 16 bytes, if it has so many.
  static constexpr int kTurns = tile.n / tile.warps_n / 8;
  static constexpr int kVector = std::min<int>(kVectorBytes / sizeof(Result), 2 * kTurns);
  using OrderOfWeight = ForNeighbours<tile.warps_n, kTurns, kVector>;
  static constexpr bool kIsOnSlices = inputs == Inputs::Split || inputs == Inputs::Scaled;

  // Warps take turns along both axes, 16 rows and 8 columns at a time.
  using TiledMma = decltype(cute::make_tiled_mma(
      typename Multiplied<Operand>::Instruction{},
      cute::Layout<cute::Shape<cute::Int<tile.warps_m>, cute::Int<tile.warps_n>, cute::_1>>{},
      cute::Tile<cute::Int<kInstruction * tile.warps_m>, cute::Int<kInstruction * tile.warps_n>,
                 cute::Int<tile.instruction_k()>>{}));

  // The eight rows that ldmatrix reads at once lie in different banks.
  static constexpr int kSwizzle = tile.row_bytes() == 128 ? 3 : 2;
  static_assert(tile.row_bytes() == 128 || tile.row_bytes() == 64);
  static constexpr int kVectorBits = tile.vector() == 8 ? 3 : 2;
  using Swizzled = decltype(cute::composition(cute::Swizzle<kSwizzle, kVectorBits, 3>{},
                                              cute::Layout<cute::Shape<cute::_8, cute::Int<tile.columns()>>,
                                                           cute::Stride<cute::Int<tile.columns()>, cute::_1>>{}));
  // Of two slices all rows of hi, then all rows of lo.
  template <int Rows>
  using Stages = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<Rows>, cute::Int<tile.k>, cute::Int<tile.stages>>{}));

  using LoaderOfX = Loader<Element, OfTile, tile.m, Stages<tile.m>, AsInMemory>;
  using LoaderOfWeight = Loader<Element, OfTile, tile.n, Stages<tile.n>, OrderOfWeight>;
};

}  // namespace epigemm::sm80_mma
