// Splitting the rows of an fp32 matrix into fp16 pieces (layout.h, pieces.h), callable without CUDA headers.
#pragma once

#include "gemm/sm90_fp16x3/layout.h"

namespace epigemm::sm90_fp16x3 {

// Enqueues the split on a device's `stream`. `buffer` has split_bytes(rows, columns, pieces) bytes. Returns nullptr, or
// what was refused and why.
const char* split_rows_cuda(const StridedMatrix& matrix, int pieces, void* buffer, int device, void* stream);

void split_rows_cpu(const StridedMatrix& matrix, int pieces, void* buffer);

}  // namespace epigemm::sm90_fp16x3
