// The names of open kernels, one for each element type and tile.
#pragma once

#include <string>
#include <vector>

#include "device/element.h"
#include "open/kernel_names.h"

namespace epigemm::sm90 {

// "epigemm_open_FAMILY_ELEMENT_TILE" and a suffix, for operands of 16 bits and fp32, which is TF32 to these kernels.
class TileNames {
 public:
  TileNames(const std::string& family, int tiles, const std::string& suffix = "");

  open::KernelName of(ElementType element, int tile) const;

 private:
  int tiles_;
  std::vector<std::string> names_;
};

}  // namespace epigemm::sm90
