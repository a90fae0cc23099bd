#include "gemm/sm90/kernel_names.h"

namespace epigemm::sm90 {
namespace {

constexpr ElementType kElements[] = {ElementType::Float16, ElementType::BFloat16, ElementType::Float32};

std::size_t place_of(ElementType element) {
  return element == ElementType::Float16 ? 0 : element == ElementType::BFloat16 ? 1 : 2;
}

}  // namespace

TileNames::TileNames(const std::string& family, int tiles, const std::string& suffix) : tiles_(tiles) {
  for (const ElementType element : kElements) {
    const char* const multiplied = element == ElementType::Float32 ? "tf32" : element_name(element);
    for (int tile = 0; tile < tiles; ++tile) {
      names_.push_back("epigemm_open_" + family + "_" + multiplied + "_" + std::to_string(tile) + suffix);
    }
  }
}

open::KernelName TileNames::of(ElementType element, int tile) const {
  return names_[place_of(element) * tiles_ + tile];
}

}  // namespace epigemm::sm90
