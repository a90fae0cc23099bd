// The open kernels that epilogues were linked into and that are loaded. Callable without CUDA headers.
#pragma once

#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm::link {

// The kernel with this epilogue in it: a cudaKernel_t. Null where it was not linked yet.
const void* find(EpilogueId epilogue, open::KernelName kernel);

// All kernels of a launch. False where one was not linked yet.
bool find(EpilogueId epilogue, const open::KernelNames& names, open::Kernels* kernels);

// Loads a linked kernel. Returns nullptr, or what the driver refused and why. A kernel that is loaded already stays.
const char* add(EpilogueId epilogue, open::KernelName kernel, const void* cubin);

}  // namespace epigemm::link
