// The arguments of an mma.sync kernel. Plain C++.
#pragma once

#include <cstdint>

#include "open/contract.h"

namespace epigemm::sm80_mma {

struct Rows {
  const void* data;
  int64_t stride;                // elements from row to row: of slices, their columns together
  const float* roots = nullptr;  // of slices, the roots of the rows' scales (gemm/fp16_slices/layout.h)
};

// The order in which CTAs compute the tiles: strips that are `width` tiles wide, along one axis.
struct Order {
  bool is_along_m;
  int walked, across;  // tiles along that axis, and along the other
  int width;           // at most `across`
};

// How the K of a tile is divided among CTAs: into shares of `units` units (shares.h), of which the first `longer` have
// one more.
struct Division {
  int splits;
  int units, longer;
  int* arrived = nullptr;  // of each tile, how many of its CTAs have written their sums; null if there is one
  float* sums = nullptr;   // [tiles][splits][tile.m * tile.n]: each thread's in the order in which it has them
};

struct Arguments {
  Rows x, weight;
  void* out;
  int64_t out_row_stride;
  int m, n;
  int k;  // elements of a row: of slices, their columns together
  Order order;
  Division division;
  open::Operands<float> operands;
};

}  // namespace epigemm::sm80_mma
