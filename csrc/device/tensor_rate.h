// A bare loop of matrix instructions: how fast the tensor cores are with nothing to wait for. Callable without CUDA
// headers.
#pragma once

#include <cstdint>

namespace epigemm::cuda {

// Enqueues `steps` rounds of mma.sync m16n8k16 (bf16, fp32 sums) that fill every multiprocessor, and tells how many
// floating-point operations these are. `sums`: on the device, one number; it is written where a sum is not finite,
// which none is. Returns nullptr, or the driver's error.
const char* multiply_bare(int steps, float* sums, int multiprocessors, int device, void* stream, int64_t* flops);

}  // namespace epigemm::cuda
