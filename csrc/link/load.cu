// Linked kernels and the CUDA runtime. No device code.
#include "link/load.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "device/launch.h"

namespace epigemm::link {
namespace {

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // it is reported here: no later call is to find it
  return cudaGetErrorString(error);
}

// The devices, a bit each, on which a kernel may be launched.
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

// While a CUDA graph is captured, a call that allocates fails, unless the thread declares its calls to be no part of
// the graph. This object does so for its scope.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

const char* load(const void* cubin, const char* name, const void** kernel) {
  const OutsideOfCapture guard;
  cudaLibrary_t library = nullptr;  // stays as long as the process
  cudaKernel_t loaded = nullptr;
  if (const char* const refused = text_of(cudaLibraryLoadData(&library, cubin, /*jitOptions=*/nullptr,
                                                              /*jitOptionsValues=*/nullptr, /*numJitOptions=*/0,
                                                              /*libraryOptions=*/nullptr,
                                                              /*libraryOptionValues=*/nullptr,
                                                              /*numLibraryOptions=*/0))) {
    return refused;
  }
  if (const char* const refused = text_of(cudaLibraryGetKernel(&loaded, library, name))) {
    cudaLibraryUnload(library);
    return refused;
  }
  *kernel = loaded;
  return nullptr;
}

const char* allow(const void* kernel, int device, std::size_t shared_bytes, std::size_t parameter_bytes) {
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (is_allowed(kernel, bit)) return nullptr;
  if (const char* const refused = check_parameter(kernel, parameter_bytes)) return refused;
  if (const char* const refused = cuda::allow_shared_memory(kernel, {{}, {}, {}, shared_bytes, device, {}, {}})) {
    return refused;
  }
  Allowed& table = allowed();
  std::unique_lock lock(table.mutex);
  table.devices[kernel] |= bit;
  return nullptr;
}

}  // namespace epigemm::link
