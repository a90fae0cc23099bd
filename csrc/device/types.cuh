// CUDA's element types and their conversions to the type that epilogues compute in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/element.h"

namespace epigemm::cuda {

template <class Element>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

__device__ __forceinline__ float to_compute(float x) { return x; }
__device__ __forceinline__ double to_compute(double x) { return x; }
__device__ __forceinline__ float to_compute(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_compute(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Element>
__device__ __forceinline__ Element from_compute(typename ComputeType<Element>::type x) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// Two at a time: bf16 is the upper half of a float, so that one instruction makes each of a pair.
template <class Element>
__device__ __forceinline__ void to_compute_pair(const Element* in, typename ComputeType<Element>::type* out) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    const auto both = *reinterpret_cast<const uint32_t*>(in);
    out[0] = __uint_as_float(both << 16);
    out[1] = __uint_as_float(both & 0xffff0000u);
  } else {
    out[0] = to_compute(in[0]);
    out[1] = to_compute(in[1]);
  }
}

// Two at a time: one instruction rounds and packs a pair of 16-bit floats.
template <class Element>
__device__ __forceinline__ void from_compute_pair(const typename ComputeType<Element>::type* in, Element* out) {
  if constexpr (std::is_same_v<Element, __half>) {
    *reinterpret_cast<__half2*>(out) = __floats2half2_rn(in[0], in[1]);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(in[0], in[1]);
  } else {
    out[0] = in[0];
    out[1] = in[1];
  }
}

// Calls body with a value of the CUDA type that `element` names.
template <class Body>
auto with_element_type(ElementType element, Body body) {
  switch (element) {
    case ElementType::Float16:
      return body(__half{});
    case ElementType::BFloat16:
      return body(__nv_bfloat16{});
    case ElementType::Float64:
      return body(double{});
    default:
      return body(float{});
  }
}

}  // namespace epigemm::cuda
