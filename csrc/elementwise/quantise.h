// Rows in e4m3 and their scales, in one pass over memory. Callable without CUDA headers.
#pragma once

#include <cstdint>

#include "device/element.h"

namespace epigemm {

// Each row, or each 128 columns of a row, becomes x / scale, rounded to e4m3 once; scale = max(largest magnitude,
// 2^-100) / 448. A NaN makes the scale NaN.
struct Quantised {
  const void* x = nullptr;  // rows of whole 16 elements, which begin at multiples of 16 bytes
  ElementType element = ElementType::Float32;
  int64_t row_stride = 0, rows = 0, columns = 0;
  void* out = nullptr;      // without gaps
  float* scales = nullptr;  // of a block those of all rows lie side by side
  bool is_in_blocks = false;
};

// Enqueues the kernel. Returns nullptr, or what was refused and why.
const char* quantise_cuda(const Quantised& problem, int device, void* stream);

}  // namespace epigemm
