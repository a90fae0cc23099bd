// Enqueueing one kernel of Hopper's: clusters, large shared memory, programmatic dependent launch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "device/launch.h"
#include "link/load.h"

namespace epigemm::sm90 {

using cuda::LaunchShape;

// A kernel of this module. `parameters`: the kernel's, one pointer each. Returns nullptr, or what the driver refused
// and why.
template <auto Kernel>
const char* enqueue(LaunchShape const& shape, void** parameters) {
  static const void* const kernel = cuda::kernel_of(reinterpret_cast<const void*>(Kernel));
  static std::atomic<uint64_t> allowed{0};  // one bit a device
  const uint64_t bit = uint64_t(1) << (shape.device % 64);
  if (!(allowed.load(std::memory_order_relaxed) & bit)) {
    if (const char* const refused = cuda::allow_shared_memory(kernel, shape)) return refused;
    if (shape.device < 64) allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  return cuda::launch(kernel, shape, parameters);
}

// And one that an epilogue was linked into, whose only parameter has `bytes`.
inline const char* enqueue_linked(const void* kernel, LaunchShape const& shape, void* parameter, std::size_t bytes) {
  if (const char* const refused = link::allow(kernel, shape.device, shape.shared_bytes, bytes)) return refused;
  void* parameters[] = {parameter};
  return cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm90
