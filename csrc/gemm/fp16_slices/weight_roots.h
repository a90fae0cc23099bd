// The roots of the scales with which a kernel begins that splits a weight itself (weight_scale.h), callable without
// CUDA headers.
#pragma once

#include "gemm/fp16_slices/layout.h"

namespace epigemm::fp16_slices {

// A weight, or one for each group of x's rows. They may have gaps between them.
struct Weights {
  StridedMatrix first;
  int64_t count = 1;
  int64_t apart = 0;  // elements, from one to the next

  int64_t rows() const { return count * first.rows; }
};

// Where the roots of the weights' rows are remembered from call to call, those of one weight behind the other's.
struct Remembered {
  float* roots = nullptr;  // fp32[rows] on the weight's device, or null: there is no room
  bool is_new = false;     // nothing is there yet
};

// The place of weights, by their address, sizes and strides. They are a hint alone: what is remembered there may be of
// another weight, or have been overwritten, and is never trusted (weight_scale.h). So nothing needs to be told when a
// weight is written, moves or is freed. The places of a device share 16 MiB, which are never freed, because CUDA graphs
// may use them; when they are full, all are given away anew. A stream that is being captured finds a place but makes
// none, because its kernels do not run yet.
Remembered remembered_roots(const Weights& weights, int device, void* stream);

// Enqueues a kernel on a device's `stream` that writes one root for each row of the weight: those that are remembered,
// as they are now, whatever they are; or those of the rows' own scales, for which it reads the weight once, where
// nothing is remembered or a call found a wrong one not long ago (weight_scale.h). Those are remembered, too, if there
// is a place. `statistics`: null, or those of the weights' groups of rows (layout.h), which the kernel sets to what has
// nothing for the fixup, for weights that the GEMM does not read. Returns nullptr, or what was refused and why.
const char* weight_roots_cuda(const Weights& weights, const Remembered& remembered, float* roots, int32_t* statistics,
                              int device, void* stream);

}  // namespace epigemm::fp16_slices
