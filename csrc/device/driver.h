// The driver's functions by name: the module is not linked with the driver, so that it loads on machines without one.
#pragma once

#include <cuda_runtime_api.h>

namespace epigemm::cuda {

// Null where the driver has none. `version`: the first with this signature, 12000 for CUDA 12.0.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();  // the caller sees nullptr
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace epigemm::cuda
