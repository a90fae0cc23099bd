// The driver's function for TMA descriptors, looked up once: CUTLASS by itself does so for every descriptor, three or
// four times a call. It is told (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL) to call the function by its name, which is
// this one.
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
