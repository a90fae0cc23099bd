// Hashing a few integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace epigemm {

inline std::size_t hash_of(std::initializer_list<int64_t> numbers) {
  uint64_t hash = 0;
  for (const int64_t number : numbers) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return static_cast<std::size_t>(hash);
}

}  // namespace epigemm
