// Copies of matrices with elements of 16 bits, callable without CUDA headers.
#pragma once

#include <cstdint>

namespace epigemm {

// Rows copied to rows of `to`. `from` lies by rows or by columns: one of its strides is 1. Strides in elements.
struct RowsCopy {
  const void* from = nullptr;
  int64_t row_stride = 0, column_stride = 1;
  void* to = nullptr;
  int64_t to_stride = 0;
  int64_t rows = 0, columns = 0;
  int64_t filled = 0;  // columns that are written: zeros behind those that are there
};

// Enqueues one kernel for one copy, or for two. A GEMM behind it may set itself up while it runs. Copies from columns
// and those with zeros go to rows of whole 16 bytes. Returns nullptr, or what was refused and why.
const char* copy_rows_cuda(const RowsCopy& first, const RowsCopy* second, int device, void* stream);

}  // namespace epigemm
