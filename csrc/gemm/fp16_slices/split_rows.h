// Splitting the rows of an fp32 matrix into fp16 slices (layout.h, slices.h), callable without CUDA headers.
#pragma once

#include "gemm/fp16_slices/layout.h"

namespace epigemm::fp16_slices {

// Enqueues the split on a device's `stream`. `buffer` has split_bytes(rows, columns, slices, order) bytes.
// `is_beside_kernel_ahead`: it starts while that kernel runs, whose results it does not read, and ends behind it.
// Returns nullptr, or what was refused and why.
const char* split_rows_cuda(const StridedMatrix& matrix, int slices, void* buffer, int device, void* stream,
                            SliceOrder order = SliceOrder::Plain, bool is_beside_kernel_ahead = false);

}  // namespace epigemm::fp16_slices
