// The element types of matrices. Plain C++.
#pragma once

namespace epigemm {

enum class ElementType { Float16, BFloat16, Float32, Float64 };

constexpr int element_bytes(ElementType element) {
  return element == ElementType::Float64 ? 8 : element == ElementType::Float32 ? 4 : 2;
}

constexpr const char* element_name(ElementType element) {
  constexpr const char* names[] = {"float16", "bfloat16", "float32", "float64"};
  return names[static_cast<int>(element)];
}

}  // namespace epigemm
