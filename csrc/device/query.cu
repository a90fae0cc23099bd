#include "device/query.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <mutex>

#include "device/driver.h"

namespace epigemm::cuda {
namespace {

constexpr int kLowestCapability = 80;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, index);
  if (error != cudaSuccess) cudaGetLastError();  // an attribute that the driver does not know is none of the caller's
  return error == cudaSuccess ? value : 0;
}

// GeForce and the professional cards of a generation share their compute capability.
bool is_geforce(int index) {
  using GetName = CUresult(char*, int, CUdevice);
  static const auto get_name = driver_function<GetName*>("cuDeviceGetName", 2000);
  char name[256] = {};
  return get_name && get_name(name, sizeof name, index) == CUDA_SUCCESS && std::strstr(name, "GeForce") != nullptr;
}

Device query(int index) {
  Device device;
  device.index = index;
  device.capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, index) + attribute(cudaDevAttrComputeCapabilityMinor, index);
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
  device.clock_mhz = 1e-3 * attribute(cudaDevAttrClockRate, index);
  // Two transfers a clock; the clock is in kHz, the bus in bits.
  const double bytes_per_ms =
      2.0 * attribute(cudaDevAttrMemoryClockRate, index) * attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8;
  device.memory_bytes_per_us = kReachableBandwidth * 1e-3 * bytes_per_ms;
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  device.has_half_rate_sums = is_geforce(index);
  return with_assumed_speed(device);
}

}  // namespace

std::string last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : cudaGetErrorString(error);
}

const Device& device(int index) {
  constexpr int kMaxDevices = 64;  // torch's own limit
  static std::once_flag asked[kMaxDevices];
  static Device devices[kMaxDevices];
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
