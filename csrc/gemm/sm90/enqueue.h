// Enqueueing one kernel of Hopper's: clusters, large shared memory, programmatic dependent launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "link/load.h"

namespace epigemm::sm90 {

struct LaunchShape {
  dim3 grid, block, cluster;
  std::size_t shared_bytes;
  int device;
  void* stream;  // cudaStream_t
  // Programmatic dependent launch, that is, barriers and descriptors are set up while the kernel ahead drains; the
  // warps that load then wait for its results.
  bool dependent;
};

// Asks once per device for the shared memory that a kernel needs: the driver takes longer over it than over a launch's
// own set-up.
template <auto Kernel>
cudaError_t allow_shared_memory(int device, std::size_t bytes) {
  static std::atomic<uint64_t> allowed{0};  // one bit a device
  const uint64_t bit = uint64_t(1) << (device % 64);
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess && device < 64) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// `parameters`: the kernel's, one pointer each. Returns nullptr, or what the driver refused and why.
inline const char* enqueue(const void* kernel, LaunchShape const& shape, void** parameters) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(shape.stream);
  config.attrs = attributes;
  if (shape.cluster.x * shape.cluster.y > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, 1};
  }
  if (shape.dependent) {
    cudaLaunchAttribute& serialization = attributes[config.numAttrs++];
    serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serialization.val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, parameters);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The same for a kernel of this module.
template <auto Kernel>
const char* enqueue(LaunchShape const& shape, void** parameters) {
  const cudaError_t error = allow_shared_memory<Kernel>(shape.device, shape.shared_bytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return enqueue(reinterpret_cast<const void*>(Kernel), shape, parameters);
}

// And for one that an epilogue was linked into, whose only parameter has `bytes`.
inline const char* enqueue_linked(const void* kernel, LaunchShape const& shape, void* parameter, std::size_t bytes) {
  if (const char* const refused = link::allow(kernel, shape.device, shape.shared_bytes, bytes)) return refused;
  void* parameters[] = {parameter};
  return enqueue(kernel, shape, parameters);
}

}  // namespace epigemm::sm90
