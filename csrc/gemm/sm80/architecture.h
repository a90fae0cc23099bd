// Every GPU since Ampere, as mma.sync's kernels see it: what they may use, and what it reaches. Plain C++.
//
// None of these rates was measured. Those of the tensor cores are NVIDIA's published figures (dense, fp32 sums) divided
// by multiprocessors and boost clock, and tests/gemm/test_architectures.py holds them against data sheets.
// Those of L2 and of cuBLAS are assumed.
#pragma once

#include "device/device.h"

namespace epigemm {

struct Sm80 {
  static constexpr int kLeastCapability = 80;
  static constexpr int kRegisters = 64 * 1024;            // of a multiprocessor
  static constexpr int kSharedOfSystem = 1024;            // bytes of every CTA
  static constexpr double kL2BytesPerCycle = 64;          // of a multiprocessor
  static constexpr double kCublasEfficiency = .9;         // of the peak rate, and of a copy's bandwidth
  static constexpr double kFP32LanesFlopsPerCycle = 256;  // of a multiprocessor; A100 has half of it

  static constexpr bool is_of(const Device& device) { return device.capability >= kLeastCapability; }

  // A100, Hopper, and Blackwell for data centres have more shared memory than graphics GPUs.
  static constexpr bool is_of_data_centre(const Device& device) {
    const int major = device.capability / 10;
    return device.capability == 80 || device.capability == 87 || major == 9 || major == 10;
  }

  // Bytes of shared memory: of a multiprocessor, and of a CTA at most.
  static constexpr int shared_of_multiprocessor(const Device& device) {
    if (!is_of_data_centre(device)) return 100 * 1024;
    return (device.capability < 90 ? 164 : 228) * 1024;
  }
  static constexpr int shared_of_cta(const Device& device) {
    return shared_of_multiprocessor(device) - kSharedOfSystem;
  }

  // The rate of mma.sync in 16 bits with fp32 sums. Hopper and Blackwell reach their peak with other instructions. The
  // rate of mma.sync there is not published: A100's is assumed.
  static constexpr double tensor_flops_per_cycle(const Device& device) {
    if (is_of_data_centre(device) && device.capability != 87) return 2048;
    return device.has_half_rate_sums ? 512 : 1024;
  }

  // The rate of the instructions that cuBLAS uses.
  static constexpr double cublas_flops_per_cycle(const Device& device) {
    const int major = device.capability / 10;
    return major == 9 ? 4096 : major == 10 ? 8192 : tensor_flops_per_cycle(device);
  }

  static constexpr double fp32_flops_per_cycle(const Device& device) {
    return device.capability == 80 ? kFP32LanesFlopsPerCycle / 2 : kFP32LanesFlopsPerCycle;
  }

  // If the device does not report it: that of the smaller chips.
  static constexpr double l2_bytes(const Device& device) {
    return device.l2_bytes > 0 ? device.l2_bytes : is_of_data_centre(device) ? 40e6 : 6e6;
  }
};

}  // namespace epigemm
