// Vectors whose element type is known at run time only.
#pragma once

#include "device/types.cuh"
#include "elementwise/fold.h"

namespace epigemm::cuda {

template <class Compute = double>
__device__ __forceinline__ Compute load(const FoldVector& vector, int64_t column, Compute absent) {
  if (!vector.data) return absent;
  const int64_t offset = column * vector.stride;
  switch (vector.element) {
    case ElementType::Float16:
      return to_compute(static_cast<const __half*>(vector.data)[offset]);
    case ElementType::BFloat16:
      return to_compute(static_cast<const __nv_bfloat16*>(vector.data)[offset]);
    case ElementType::Float64:
      return static_cast<Compute>(static_cast<const double*>(vector.data)[offset]);
    default:
      return static_cast<const float*>(vector.data)[offset];
  }
}

// Rounded once from Compute, the type of the arithmetic: float, or double for vectors of double.
template <class Compute>
__device__ __forceinline__ void store(const WrittenVector& vector, int64_t column, Compute value) {
  if (!vector.data) return;
  const int64_t offset = column * vector.stride;
  switch (vector.element) {
    case ElementType::Float16:
      static_cast<__half*>(vector.data)[offset] = from_compute<__half>(static_cast<float>(value));
      break;
    case ElementType::BFloat16:
      static_cast<__nv_bfloat16*>(vector.data)[offset] = from_compute<__nv_bfloat16>(static_cast<float>(value));
      break;
    case ElementType::Float64:
      static_cast<double*>(vector.data)[offset] = value;
      break;
    default:
      static_cast<float*>(vector.data)[offset] = static_cast<float>(value);
  }
}

}  // namespace epigemm::cuda
