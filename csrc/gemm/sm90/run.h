// Launching a CUTLASS GEMM.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "cute/int_tuple.hpp"
#include "cutlass/device_kernel.h"

namespace epigemm::sm90 {

// Asks once per device for the shared memory that a kernel needs: the driver takes longer over it than over a launch's
// own set-up.
template <class GemmKernel>
cudaError_t allow_shared_memory(int device) {
  static std::atomic<uint64_t> allowed{0};  // one bit a device
  const uint64_t bit = uint64_t(1) << (device % 64);
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      cutlass::device_kernel<GemmKernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, GemmKernel::SharedStorageSize);
  if (error == cudaSuccess && device < 64) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Enqueues a GEMM. The caller has seen to what TMA asks of strides and addresses, and that rows of the output may be
// written up to whole 16 bytes (CUTLASS's own can_implement would also refuse an N that ends between). Returns nullptr,
// or what the driver refused and why. `dependent`: programmatic dependent launch, that is, barriers and descriptors are
// set up while the kernel ahead drains; the warps that load then wait for its results.
//
// CUTLASS's own adapter does the same, but sets the kernel's attributes at every call.
template <class Gemm>
const char* run(typename Gemm::Arguments const& arguments, void* stream, bool dependent) {
  using Kernel = typename Gemm::GemmKernel;
  using ClusterShape = typename Kernel::DispatchPolicy::ClusterShape;
  static_assert(Gemm::ArchTag::kMinComputeCapability == 90);
  cudaError_t error = allow_shared_memory<Kernel>(arguments.hw_info.device_id);
  if (error != cudaSuccess) return cudaGetErrorString(error);

  // The persistent scheduler needs no workspace.
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = Gemm::get_grid_shape(params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if constexpr (cute::size(ClusterShape{}) > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{}), 1};
  }
  if (dependent) {
    cudaLaunchAttribute& serialization = attributes[config.numAttrs++];
    serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serialization.val.programmaticStreamSerializationAllowed = 1;
  }
  void* kernel_arguments[] = {&params};
  error =
      cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(&cutlass::device_kernel<Kernel>), kernel_arguments);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace epigemm::sm90
