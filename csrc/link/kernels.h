// The loaded kernels: open kernels with an epilogue linked into them. Callable without CUDA headers.
#pragma once

#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm::link {

// The kernel with this epilogue in it, a cudaKernel_t; null if it has not been loaded. `capability`: of the GPU, as in
// Device. Each architecture has machine code of its own.
const void* find(EpilogueId epilogue, int capability, open::KernelName kernel);

// All kernels of a launch. False if one has not been loaded.
bool find(EpilogueId epilogue, int capability, const open::KernelNames& names, open::Kernels* kernels);

// Loads a linked kernel. Returns nullptr, or what the driver refused and why. If the kernel is loaded already, it is
// kept.
const char* add(EpilogueId epilogue, int capability, open::KernelName kernel, const void* cubin);

}  // namespace epigemm::link
