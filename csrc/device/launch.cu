#include "device/launch.h"

#include <cuda.h>

#include "device/driver.h"

namespace epigemm::cuda {
namespace {

const char* text_of(CUresult error) {
  static const auto get_string = driver_function<decltype(&cuGetErrorString)>("cuGetErrorString", 6000);
  const char* text = nullptr;
  if (error == CUDA_SUCCESS) return nullptr;
  return get_string && get_string(error, &text) == CUDA_SUCCESS && text ? text : "the driver refused the launch";
}

}  // namespace

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

const char* find_kernel(const void* symbol, const void** kernel) {
  cudaKernel_t found = nullptr;
  const char* const refused = text_of(cudaGetKernel(&found, symbol));
  *kernel = found;
  return refused;
}

const char* allow_shared_memory(const void* kernel, int device, std::size_t bytes) {
  const auto handle = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return text_of(cudaKernelSetAttributeForDevice(handle, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(bytes), device));
}

const char* launch(const void* kernel, LaunchShape const& shape, void** parameters) {
  static const auto launch_kernel = driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx", 11060);
  if (!launch_kernel) return "the driver has no cuLaunchKernelEx";
  CUlaunchAttribute attributes[2]{};
  CUlaunchConfig config{};
  config.gridDimX = shape.grid.x, config.gridDimY = shape.grid.y, config.gridDimZ = shape.grid.z;
  config.blockDimX = shape.block.x, config.blockDimY = shape.block.y, config.blockDimZ = shape.block.z;
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = static_cast<CUstream>(shape.stream);
  config.attrs = attributes;
  if (shape.cluster.x * shape.cluster.y > 1) {
    CUlaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = shape.cluster.x;
    cluster.value.clusterDim.y = shape.cluster.y;
    cluster.value.clusterDim.z = 1;
  }
  if (shape.dependent) {
    CUlaunchAttribute& serialization = attributes[config.numAttrs++];
    serialization.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    serialization.value.programmaticStreamSerializationAllowed = 1;
  }
  // The driver takes a CUkernel, which a cudaKernel_t is, in place of a function.
  const auto function = static_cast<CUfunction>(const_cast<void*>(kernel));
  CUresult error = launch_kernel(&config, function, parameters, /*extra=*/nullptr);
  if (error == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not called the runtime yet, such as the autograd engine's: this makes the device's context its.
    if (const char* const refused = text_of(cudaSetDevice(shape.device))) return refused;
    error = launch_kernel(&config, function, parameters, /*extra=*/nullptr);
  }
  return text_of(error);
}

}  // namespace epigemm::cuda
