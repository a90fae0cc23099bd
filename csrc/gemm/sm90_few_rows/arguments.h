// What a kernel of few rows gets.
#pragma once

#include <cstdint>

#include "gemm/sm90_few_rows/tiles.h"
#include "open/contract.h"

namespace epigemm::sm90_few_rows {

// A matrix of `count` rows, each contiguous.
struct Rows {
  const float* data;
  int64_t stride;  // elements
  int count;
};

struct Arguments {
  Rows many, few;
  int k;
  bool are_few_of_x;    // they are D's rows, and the many its columns; or the other way round
  bool has_vectors;     // rows of both matrices are whole 16 bytes, at multiples of them
  float *out, *stored;  // `stored`: for the functor's second values, if it has them
  int64_t out_row_stride, stored_row_stride;
  open::Operands<float> operands;
};

constexpr int shared_bytes(const Tile& tile) { return 4 * (2 * tile.few * kStageK + tile.many * tile.few); }

}  // namespace epigemm::sm90_few_rows
