// The loaded kernels: open kernels with an epilogue linked into them. Callable without CUDA headers.
#pragma once

#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm::link {

// The kernel with this epilogue in it, a cudaKernel_t; null if it has not been loaded.
const void* find(EpilogueId epilogue, open::KernelName kernel);

// All kernels of a launch. False if one has not been loaded.
bool find(EpilogueId epilogue, const open::KernelNames& names, open::Kernels* kernels);

// Loads a linked kernel. Returns nullptr, or what the driver refused and why. If the kernel is loaded already, it is
// kept.
const char* add(EpilogueId epilogue, open::KernelName kernel, const void* cubin);

}  // namespace epigemm::link
