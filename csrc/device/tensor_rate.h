// A bare loop of matrix instructions: how fast the tensor cores are with nothing to wait for. Callable without CUDA
// headers.
#pragma once

#include <cstdint>

namespace epigemm::cuda {

// Enqueues `steps` rounds of mma.sync with fp32 sums, m16n8k16 of bf16 or m16n8k8 of TF32, that fill every
// multiprocessor, and tells how many floating-point operations these are. `sums`: on the device, one number; it is
// written where a sum is not finite, which none is. Returns nullptr, or the driver's error.
const char* multiply_bare(int steps, bool is_tf32, float* sums, int multiprocessors, int device, void* stream,
                          int64_t* flops);

}  // namespace epigemm::cuda
