// The elementwise kernels of an epilogue: compiled with the package for its own functors, else linked at run time.
// Callable without CUDA headers.
#pragma once

#include "device/element.h"
#include "epilogue/registry.h"
#include "open/kernel_names.h"

namespace epigemm {

// Strided: of compiled functors alone.
enum class ElementwiseKernel { Value, Derivative, DerivativeSums, Strided };

// The address (or handle) of a kernel, and of one for most of its problems that takes fewer registers: of whole
// matrices (kernel.cuh), of those with fewer than 2^31 elements (strided.cuh). Compiled kernels have both.
struct KernelForms {
  const void* any = nullptr;  // null: the epilogue has to be linked first
  const void* most = nullptr;
  int rows_of_most = 1;  // of a thread, in that one
};

// The open kernel into which the epilogue has to be linked, by the element type of x (of grad).
open::KernelName elementwise_name(ElementwiseKernel which, ElementType element);

// The open kernel of the value; none where a compiled one exists.
open::KernelNames elementwise_kernels(EpilogueId epilogue, ElementType element);

namespace cuda {

// A compiled kernel, of an epilogue that has them (has_compiled_elementwise).
KernelForms compiled_kernel(EpilogueId epilogue, ElementwiseKernel which, ElementType element);

}  // namespace cuda
}  // namespace epigemm
