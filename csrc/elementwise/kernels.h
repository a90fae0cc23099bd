// The elementwise kernels of an epilogue: compiled with the package for its own functors, else linked at run time.
// Callable without CUDA headers.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm {

// Strided: of compiled functors alone.
enum class ElementwiseKernel { Value, Derivative, DerivativeSums, Strided };

// The open kernel into which the epilogue has to be linked, by the element type of x (of grad).
open::KernelName elementwise_name(ElementwiseKernel which, ElementType element);

// The open kernel of the value; none where a compiled one exists.
open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element);

namespace cuda {

// The address of a compiled kernel, of an epilogue that has them (has_compiled_elementwise).
const void* compiled_kernel(EpilogueId epilogue, ElementwiseKernel which, ElementType element);

}  // namespace cuda
}  // namespace epigemm
