// Hopper: what its kernels may use. Plain C++.
#pragma once

#include "device/device.h"

namespace epigemm {

struct Sm90 {
  static constexpr int kCapability = 9;            // 9.x: sm_90a code runs on nothing else
  static constexpr int kSharedBytes = 227 * 1024;  // of a CTA, at most
  static constexpr int kTmaAlignment = 16;    // bytes: what the tensor memory accelerator asks of pointers and strides
  static constexpr int kMostClusterCtas = 8;  // of the clusters that every device takes

  static constexpr bool is_of(const Device& device) { return device.capability / 10 == kCapability; }
};

}  // namespace epigemm
