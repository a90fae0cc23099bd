// Element types on a CPU: 16-bit floats as bits, converted without branches so that loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#include "epilogue/math.h"

namespace epigemm::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class Element>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

using math::detail::bit_cast;

EPIGEMM_HOST_DEVICE float to_compute(float x) { return x; }
EPIGEMM_HOST_DEVICE double to_compute(double x) { return x; }
EPIGEMM_HOST_DEVICE float to_compute(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// Moves exponent and mantissa into place and corrects the bias by a multiplication, which also normalises subnormals.
EPIGEMM_HOST_DEVICE float to_compute(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * bit_cast<float>(uint32_t(254 - 15) << 23));
  const uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN keep an exponent of all ones
  return bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

template <class Element>
EPIGEMM_HOST_DEVICE Element from_compute(typename ComputeType<Element>::type x) {
  return x;
}

// Rounds to nearest, ties to even, by adding just under half of the last place that stays.
template <>
EPIGEMM_HOST_DEVICE BFloat16 from_compute<BFloat16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0u)};
}

template <>
EPIGEMM_HOST_DEVICE Float16 from_compute<Float16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent, round to nearest even on the 13 bits that go.
  const uint32_t normal = (magnitude - (uint32_t(127 - 15) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 aligns the binary point so that the hardware's own rounding leaves the mantissa.
  const float half = 0.5f;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + half) - bit_cast<uint32_t>(half);
  uint32_t result = magnitude < (uint32_t(127 - 14) << 23) ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // from halfway past the largest finite number on: infinity
  result = magnitude > 0x7f800000u ? 0x7e00u : result;   // NaN
  return {static_cast<uint16_t>(sign | result)};
}

}  // namespace epigemm::cpu
