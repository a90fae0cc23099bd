// The driver's functions for TMA descriptors, looked up once: CUTLASS by itself does so for every descriptor, three or
// four times a call. It is told (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL) to call the function by its name, which is
// this one: the module is not linked with the driver, so that it loads on machines without one.
//
// All descriptors of all families are made here, so here is where they are kept.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "gemm/sm90/descriptors.h"

namespace {

using epigemm::sm90::DescriptorCache;
using epigemm::sm90::DescriptorShape;

template <class Function>
Function find(const char* name) {
  constexpr unsigned kFirstVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, kFirstVersion, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI
cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const auto encode = find<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  static const auto replace = find<decltype(&cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  static thread_local DescriptorCache<CUtensorMap> cache;
  if (!encode || !replace) return CUDA_ERROR_NOT_FOUND;
  if (rank == 0 || rank > DescriptorShape::kMostRank) return CUDA_ERROR_INVALID_VALUE;

  DescriptorShape shape;
  for (cuuint32_t i = 0; i < rank; ++i) {
    shape.sizes[i] = static_cast<int64_t>(sizes[i]);
    shape.box[i] = box[i];
    shape.element_strides[i] = element_strides[i];
    if (i + 1 < rank) shape.strides[i] = static_cast<int64_t>(strides[i]);
  }
  shape.rank = rank;
  shape.type = type;
  shape.interleave = interleave;
  shape.swizzle = swizzle;
  shape.promotion = promotion;
  shape.fill = fill;
  return cache.get(
      map, shape, address,
      [&](CUtensorMap* made, void* at) {
        return encode(made, type, rank, at, sizes, strides, box, element_strides, interleave, swizzle, promotion, fill);
      },
      replace);
}
