#include "elementwise/launch.h"

#include <cuda_runtime.h>

#include <mutex>
#include <vector>

namespace epigemm::cuda {

#define EPIGEMM_EPILOGUE(name, Functor, forms)   \
  void launch_##name(const ElementwiseProblem&); \
  void launch_derivative_of_##name(const DerivativeProblem&);
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE

namespace {

using Launch = void (*)(const ElementwiseProblem&);

constexpr Launch kLaunches[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) &launch_##name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

using LaunchDerivative = void (*)(const DerivativeProblem&);

constexpr LaunchDerivative kDerivatives[] = {
#define EPIGEMM_EPILOGUE(name, Functor, forms) &launch_derivative_of_##name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

constexpr int kLowestCapability = 80;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Device query(int index) {
  int major = 0, minor = 0;
  Device device;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
  device.capability = major * 10 + minor;
  return device;
}

}  // namespace

void launch(const ElementwiseProblem& problem) { kLaunches[static_cast<int>(problem.epilogue)](problem); }

void launch_derivative(const DerivativeProblem& problem) { kDerivatives[static_cast<int>(problem.epilogue)](problem); }

std::string last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : cudaGetErrorString(error);
}

const Device& device(int index) {
  constexpr int kMaxDevices = 64;  // torch's own limit
  static Device devices[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  std::call_once(asked[index], [index] { devices[index] = query(index); });
  return devices[index];
}

std::string status(int index) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "there is no CUDA driver";
  if (driver / 1000 < CUDART_VERSION / 1000) {
    return "the driver supports CUDA " + version_text(driver) + "; these kernels need CUDA " +
           std::to_string(CUDART_VERSION / 1000) + " (driver 580 or newer)";
  }
  const int capability = device(index).capability;
  if (capability < kLowestCapability) {
    return "the device has compute capability " + std::to_string(capability / 10) + "." +
           std::to_string(capability % 10) + "; these kernels need 8.0 or newer";
  }
  return std::string();
}

std::string toolkit_version() { return version_text(CUDART_VERSION); }

}  // namespace epigemm::cuda
