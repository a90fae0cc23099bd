// The driver's function for TMA descriptors, looked up once: CUTLASS would look it up for every descriptor, three or
// four times a call. With CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL it calls the function by its name, and finds this
// one.
#include <cuda.h>

#include "device/driver.h"

extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI
cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const auto encode =
      epigemm::cuda::driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  if (!encode) return CUDA_ERROR_NOT_FOUND;
  return encode(map, type, rank, address, sizes, strides, box, element_strides, interleave, swizzle, promotion, fill);
}
