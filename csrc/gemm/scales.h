// By which 8-bit numbers are multiplied, and results of 8 bits divided.
#pragma once

#include <cstdint>

namespace epigemm {

// Of x or the weight, in fp32 on the device: one number for the matrix, one for each row, or one for each block. A
// block has 128 of K, and one row of x or 128 rows of the weight.
struct Scale {
  const float* data = nullptr;
  bool is_of_rows = false, is_of_blocks = false;
  int64_t row_stride = 0, block_stride = 0;  // of blocks: elements from one row, or 128, to the next, and along K
};

struct OutScale {
  const float* data = nullptr;  // of all results, on the device; null: `value`
  float value = 1;
  bool is_of_blocks = false;  // each 128 columns of a row have a scale, which the call gives
  float* blocks = nullptr;    // where these go, one row's behind the other's
  int64_t blocks_step = 0;    // from one block's scale in a row to the next one's
};

}  // namespace epigemm
