// Copies of matrices with elements of 16 bits, callable without CUDA headers.
#pragma once

#include <cstdint>

namespace epigemm {

// A matrix that is copied to `to`, row by row. `from` has consecutive elements along its rows or along its columns: one
// of its strides is 1. Strides are in elements.
struct RowsCopy {
  const void* from = nullptr;
  int64_t row_stride = 0, column_stride = 1;
  void* to = nullptr;
  int64_t to_stride = 0;
  int64_t rows = 0, columns = 0;
  int64_t filled = 0;  // columns that are written: those of `from`, then zeros
};

// Enqueues one kernel for one copy, or for two. A GEMM that follows in the stream may start its setup while the copy
// runs. Where `from` lies by columns, or zeros are added, the rows of `to` have to be multiples of 16 bytes. Returns
// nullptr, or what was refused and why.
const char* copy_rows_cuda(const RowsCopy& first, const RowsCopy* second, int device, void* stream);

}  // namespace epigemm
