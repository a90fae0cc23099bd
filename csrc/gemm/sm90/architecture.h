// Hopper's limits for kernels. Plain C++.
#pragma once

#include "device/device.h"

namespace epigemm {

struct Sm90 {
  static constexpr int kCapability = 9;            // 9.x: sm_90a code does not run on other GPUs
  static constexpr int kSharedBytes = 227 * 1024;  // of a CTA, at most
  static constexpr int kTmaAlignment =
      16;  // bytes: the alignment that the tensor memory accelerator requires of pointers and strides
  static constexpr int kMostClusterCtas = 8;  // the largest cluster that every device supports

  static constexpr bool is_of(const Device& device) { return device.capability / 10 == kCapability; }
};

}  // namespace epigemm
