// The roots of the scales with which a kernel begins that splits a weight itself (weight_scale.h), callable without
// CUDA headers.
#pragma once

#include "gemm/fp16_slices/layout.h"

namespace epigemm::fp16_slices {

// Enqueues a kernel on a device's `stream` that writes one root for each row of the weight: those of `remembered`, as
// they are now, whatever they are; or without it those of the rows' own scales, for which it reads the weight once.
// Returns nullptr, or what was refused and why.
const char* weight_roots_cuda(const StridedMatrix& weight, const float* remembered, float* roots, int device,
                              void* stream);

}  // namespace epigemm::fp16_slices
