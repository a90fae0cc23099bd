// Which kernel computes an epilogue without a product: one that is compiled with the package, or one into which the
// epilogue is linked at run time. Callable without CUDA headers.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm {

// The open kernel into which the epilogue has to be linked, for x of that element type; none where a compiled one
// exists.
open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element);

}  // namespace epigemm
