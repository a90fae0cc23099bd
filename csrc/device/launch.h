// Enqueueing one kernel by the driver's own function. The runtime's does the same, but takes the host longer
// (docs/architecture.md, "Launches").
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

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

// All that follow return nullptr, or what was refused and why.

// The text of an error of the runtime's, which no later call is to find.
const char* text_of(cudaError_t error);

// The handle of a kernel of this module, by its address: a cudaKernel_t, which serves every device.
const char* find_kernel(const void* symbol, const void** kernel);

// Sets the shared memory that a kernel may ask for on a device. The driver takes longer over it than over a launch:
// callers remember that they did.
const char* allow_shared_memory(const void* kernel, int device, std::size_t bytes);

// `kernel`: a cudaKernel_t. `parameters`: the kernel's, one pointer each.
const char* launch(const void* kernel, LaunchShape const& shape, void** parameters);

// A kernel of this module, looked up once.
template <auto Kernel>
const char* find_kernel(const void** kernel) {
  static std::atomic<const void*> known{nullptr};
  *kernel = known.load(std::memory_order_relaxed);
  if (*kernel) return nullptr;
  const char* const refused = find_kernel(reinterpret_cast<const void*>(Kernel), kernel);
  if (!refused) known.store(*kernel, std::memory_order_relaxed);
  return refused;
}

template <auto Kernel>
const char* launch(LaunchShape const& shape, void** parameters) {
  const void* kernel = nullptr;
  const char* const refused = find_kernel<Kernel>(&kernel);
  return refused ? refused : launch(kernel, shape, parameters);
}

// The same for one that asks for more shared memory than every kernel has.
template <auto Kernel>
const char* launch_with_shared_memory(LaunchShape const& shape, void** parameters) {
  static std::atomic<uint64_t> allowed{0};  // one bit a device
  const void* kernel = nullptr;
  if (const char* const refused = find_kernel<Kernel>(&kernel)) return refused;
  const uint64_t bit = shape.device < 64 ? uint64_t(1) << shape.device : 0;
  if (!(allowed.load(std::memory_order_relaxed) & bit)) {
    if (const char* const refused = allow_shared_memory(kernel, shape.device, shape.shared_bytes)) return refused;
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  return launch(kernel, shape, parameters);
}

}  // namespace epigemm::cuda
