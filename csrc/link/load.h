// Loads linked kernels through the CUDA runtime. Callable without CUDA headers.
#pragma once

namespace epigemm::link {

// Loads a cubin's kernel of this name: a cudaKernel_t, which serves every device. Returns nullptr, or what was refused.
const char* load(const void* cubin, const char* name, const void** kernel);

}  // namespace epigemm::link
