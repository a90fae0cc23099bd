// Launches one kernel by the driver's function. The runtime's function does the same, but takes the host 5.5 us for a
// GEMM instead of 3.2 us (an H200's host: benchmarks/results/nvidia-h200/host/notes.md).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace epigemm::cuda {

struct LaunchShape {
  dim3 grid, block, cluster;
  std::size_t shared_bytes;
  int device;
  void* stream;  // cudaStream_t
  // Programmatic dependent launch, that is, barriers and descriptors are set up while the kernel ahead drains; the
  // warps that load then wait for its results.
  bool dependent;
};

// The handle of a kernel of this module, by its address: a cudaKernel_t, which serves every device. One that could not
// be looked up, for want of memory, is looked up again at its launches.
const void* kernel_of(const void* symbol);

// Sets the shared memory that a kernel may ask for on the shape's device. It takes longer than a launch, so callers do
// it once. This function and the ones below return nullptr, or the driver's error.
const char* allow_shared_memory(const void* kernel, LaunchShape const& shape);

// For a kernel that was linked and loaded. Once per kernel and device: asks for the shared memory that it needs, and
// holds its first parameter's size against the host's.
const char* allow(const void* kernel, int device, std::size_t shared_bytes, std::size_t parameter_bytes);

// `kernel`: a cudaKernel_t. `parameters`: the kernel's, one pointer each.
const char* launch(const void* kernel, LaunchShape const& shape, void** parameters);

// A kernel of this module.
template <auto Kernel>
const char* launch(LaunchShape const& shape, void** parameters) {
  static const void* const kernel = kernel_of(reinterpret_cast<const void*>(Kernel));
  return launch(kernel, shape, parameters);
}

}  // namespace epigemm::cuda
