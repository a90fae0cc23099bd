// Loads and prepares linked kernels through the CUDA runtime. Callable without CUDA headers.
#pragma once

#include <cstddef>

namespace epigemm::link {

// Loads a cubin's kernel of this name: a cudaKernel_t, which serves every device. Returns nullptr, or what was refused.
const char* load(const void* cubin, const char* name, const void** kernel);

// Once per kernel and device: asks for the shared memory that it needs, and holds its parameter against the host's.
// Returns nullptr, or what was refused and why.
const char* allow(const void* kernel, int device, std::size_t shared_bytes, std::size_t parameter_bytes);

}  // namespace epigemm::link
