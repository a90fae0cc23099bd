// Loading linked kernels by the CUDA runtime. No device code.
#include "link/load.h"

#include <cuda_runtime_api.h>

namespace epigemm::link {
namespace {

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // it is reported here: no later call is to find it
  return cudaGetErrorString(error);
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

}  // namespace epigemm::link
