// The driver's function for TMA descriptors, looked up once: CUTLASS by itself does so for every descriptor, three or
// four times a call. It is told (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL) to call the function by its name, which is
// this one: the module is not linked with the driver, so that it loads on machines without one.
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  constexpr unsigned kFirstVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI
cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const Encode encode = find_encode();
  if (!encode) return CUDA_ERROR_NOT_FOUND;
  return encode(map, type, rank, address, sizes, strides, box, element_strides, interleave, swizzle, promotion, fill);
}
