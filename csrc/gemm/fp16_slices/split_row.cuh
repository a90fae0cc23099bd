// What both splits on a GPU, along rows and across them, have in common.
#pragma once

#include <cuda_fp16.h>

#include "gemm/fp16_slices/layout.h"
#include "gemm/fp16_slices/slices.h"

namespace epigemm::fp16_slices {

// The slices that are wanted.
struct Form {
  int slices;
  SliceOrder order;
};

__device__ __forceinline__ Slices<__half> split_one(float s) {
  return split_element<__half>(s, [](float x) { return __float2half_rn(x); }, [](__half x) { return __half2float(x); });
}

__device__ __forceinline__ void write_statistics(const SplitMatrix& out, int64_t row, float largest, int32_t large,
                                                 int32_t flags, int32_t tiny) {
  out.roots[row] = row_root(row_exponent(largest));
  out.tiny[row] = tiny;
  out.statistics[row] = row_statistics(large, flags, tiny, row_scale(largest), out.columns);
}

}  // namespace epigemm::fp16_slices
