// Enqueueing one kernel of Hopper's: clusters, large shared memory, programmatic dependent launch.
#pragma once

#include "device/launch.h"
#include "link/load.h"

namespace epigemm::sm90 {

using cuda::LaunchShape;

// A kernel of this module. `parameters`: the kernel's, one pointer each. Returns nullptr, or what the driver refused
// and why.
template <auto Kernel>
const char* enqueue(LaunchShape const& shape, void** parameters) {
  return cuda::launch_with_shared_memory<Kernel>(shape, parameters);
}

// And one that an epilogue was linked into, whose only parameter has `bytes`.
inline const char* enqueue_linked(const void* kernel, LaunchShape const& shape, void* parameter, std::size_t bytes) {
  if (const char* const refused = link::allow(kernel, shape.device, shape.shared_bytes, bytes)) return refused;
  void* parameters[] = {parameter};
  return cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm90
