#include "device/launch.h"

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "device/driver.h"
#include "device/fill.h"

namespace epigemm::cuda {
namespace {

const char* text_of(CUresult error) {
  static const auto get_string = driver_function<decltype(&cuGetErrorString)>("cuGetErrorString", 6000);
  const char* text = nullptr;
  if (error == CUDA_SUCCESS) return nullptr;
  return get_string && get_string(error, &text) == CUDA_SUCCESS && text ? text : "the driver refused the launch";
}

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // it is reported here: no later call is to find it
  return cudaGetErrorString(error);
}

const char* look_up(const void* symbol, const void** kernel) {
  cudaKernel_t found = nullptr;
  const char* const refused = text_of(cudaGetKernel(&found, symbol));
  *kernel = found;
  return refused;
}

// Kernels that could not be looked up at first: by address, the handle, once it is known.
struct Unknown {
  std::mutex mutex;
  std::unordered_map<const void*, const void*> kernels;
  std::atomic<bool> is_any{false};
};

// Never destroyed: calls may come while the process ends.
Unknown& unknown() {
  static auto* const all = new Unknown;
  return *all;
}

// `*kernel`: a handle, or the address that `kernel_of` gave in place of one.
const char* make_known(const void** kernel) {
  if (!unknown().is_any.load(std::memory_order_relaxed)) return nullptr;
  const std::lock_guard<std::mutex> lock(unknown().mutex);
  const auto found = unknown().kernels.find(*kernel);
  if (found == unknown().kernels.end()) return nullptr;
  if (!found->second) {
    if (const char* const refused = look_up(found->first, &found->second)) return refused;
  }
  *kernel = found->second;
  return nullptr;
}

// Calls an enqueuing function of the driver, again where the thread has not called the runtime yet, such as the
// autograd engine's: cudaSetDevice makes the device's context current.
template <class Enqueue>
const char* enqueued(int device, Enqueue enqueue) {
  CUresult error = enqueue();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {
    if (const char* const refused = text_of(cudaSetDevice(device))) return refused;
    error = enqueue();
  }
  return text_of(error);
}

// The devices, a bit each, on which a linked kernel may be launched.
struct Allowed {
  std::shared_mutex mutex;
  std::unordered_map<const void*, uint64_t> devices;
};

// Never destroyed: calls may come while the process ends.
Allowed& allowed() {
  static auto* const table = new Allowed;
  return *table;
}

bool is_allowed(const void* kernel, uint64_t bit) {
  Allowed& table = allowed();
  std::shared_lock lock(table.mutex);
  const auto found = table.devices.find(kernel);
  return found != table.devices.end() && (found->second & bit);
}

const char* check_parameter(const void* kernel, std::size_t bytes) {
  std::size_t offset = 0, expected = 0;
  if (const char* const refused = text_of(cudaFuncGetParamInfo(kernel, 0, &offset, &expected))) return refused;
  return expected == bytes ? nullptr : "a linked kernel's parameter differs in size from the host's";
}

}  // namespace

const void* kernel_of(const void* symbol) {
  const void* kernel = nullptr;
  if (!look_up(symbol, &kernel)) return kernel;
  const std::lock_guard<std::mutex> lock(unknown().mutex);
  unknown().kernels[symbol] = nullptr;
  unknown().is_any = true;
  return symbol;
}

const char* allow_shared_memory(const void* kernel, LaunchShape const& shape) {
  if (const char* const refused = make_known(&kernel)) return refused;
  const auto handle = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return text_of(cudaKernelSetAttributeForDevice(handle, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shape.shared_bytes), shape.device));
}

const char* allow(const void* kernel, int device, std::size_t shared_bytes, std::size_t parameter_bytes) {
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (is_allowed(kernel, bit)) return nullptr;
  if (const char* const refused = check_parameter(kernel, parameter_bytes)) return refused;
  if (const char* const refused = allow_shared_memory(kernel, {{}, {}, {}, shared_bytes, device, {}, {}})) {
    return refused;
  }
  Allowed& table = allowed();
  std::unique_lock lock(table.mutex);
  table.devices[kernel] |= bit;
  return nullptr;
}

const char* launch(const void* kernel, LaunchShape const& shape, void** parameters) {
  static const auto launch_kernel = driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx", 11060);
  if (!launch_kernel) return "the driver has no cuLaunchKernelEx";
  if (const char* const refused = make_known(&kernel)) return refused;
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
  return enqueued(shape.device, [&] { return launch_kernel(&config, function, parameters, /*extra=*/nullptr); });
}

const char* fill(void* memory, uint16_t value, int64_t count, int device, void* stream) {
  static const auto set = driver_function<decltype(&cuMemsetD16Async)>("cuMemsetD16Async", 3020);
  if (!set) return "the driver has no cuMemsetD16Async";
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  return enqueued(device,
                  [&] { return set(address, value, static_cast<std::size_t>(count), static_cast<CUstream>(stream)); });
}

}  // namespace epigemm::cuda
