#include "device/launch.h"

#include <cuda.h>

namespace epigemm::cuda {
namespace {

// The module is not linked with the driver, so that it loads on machines without one.
template <class Function>
Function find(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

const char* text_of(CUresult error) {
  static const auto get_string = find<decltype(&cuGetErrorString)>("cuGetErrorString", 6000);
  const char* text = nullptr;
  if (get_string && get_string(error, &text) == CUDA_SUCCESS && text) return text;
  return "the driver refused the launch";
}

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // it is reported here: no later call is to find it
  return cudaGetErrorString(error);
}

}  // namespace

const void* kernel_of(const void* symbol) {
  cudaKernel_t kernel = nullptr;
  return text_of(cudaGetKernel(&kernel, symbol)) ? nullptr : kernel;
}

const char* allow_shared_memory(const void* kernel, LaunchShape const& shape) {
  const auto handle = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return text_of(cudaKernelSetAttributeForDevice(handle, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shape.shared_bytes), shape.device));
}

const char* launch(const void* kernel, LaunchShape const& shape, void** parameters) {
  static const auto launch_kernel = find<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx", 11060);
  if (!launch_kernel || !kernel) return "a kernel or the driver's launch was not found";
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
  return error == CUDA_SUCCESS ? nullptr : text_of(error);
}

}  // namespace epigemm::cuda
