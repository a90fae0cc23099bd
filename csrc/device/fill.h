// Filling memory on a device, callable without CUDA headers.
#pragma once

#include <cstdint>

namespace epigemm::cuda {

// Enqueues a memset of `count` equal 16-bit values on a device's stream. Returns nullptr, or what was refused.
const char* fill(void* memory, uint16_t value, int64_t count, int device, void* stream);

}  // namespace epigemm::cuda
