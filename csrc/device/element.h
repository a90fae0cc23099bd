// The element types of matrices. Plain C++.
#pragma once

namespace epigemm {

enum class ElementType { Float16, BFloat16, Float32, Float64, Float8E4M3, Float8E5M2, Int32 };

// Those of x and the weight alone. Int32 is of the ends of groups alone.
constexpr bool is_8_bits(ElementType element) {
  return element == ElementType::Float8E4M3 || element == ElementType::Float8E5M2;
}

constexpr int element_bytes(ElementType element) {
  constexpr int bytes[] = {2, 2, 4, 8, 1, 1, 4};
  return bytes[static_cast<int>(element)];
}

constexpr const char* element_name(ElementType element) {
  constexpr const char* names[] = {"float16",       "bfloat16",    "float32", "float64",
                                   "float8_e4m3fn", "float8_e5m2", "int32"};
  return names[static_cast<int>(element)];
}

}  // namespace epigemm
