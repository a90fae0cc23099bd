// By what results of 8 bits are divided.
#pragma once

#include <cstdint>

namespace epigemm {

struct OutScale {
  const float* data = nullptr;  // of all results, on the device; null: `value`
  float value = 1;
  bool is_of_blocks = false;  // each 128 columns of a row have a scale, which the call gives
  float* blocks = nullptr;    // where these go, one row's behind the other's
  int64_t blocks_step = 0;    // from one block's scale in a row to the next one's
};

}  // namespace epigemm
