// Which kernel computes an epilogue alone: one that is compiled with the package, or one that it is linked into.
// Callable without CUDA headers.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm {

// Whether there is one, on a GPU or on a CPU. Elsewhere PyTorch's operators compute the epilogue.
bool has_elementwise(EpilogueId epilogue, bool is_on_gpu);

// The open kernel that the epilogue has to be linked into, by the element type of x; none where one is compiled.
open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element);

}  // namespace epigemm
