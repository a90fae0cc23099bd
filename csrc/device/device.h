// The figures of a device that the planner uses. Plain C++: the same on a machine without a GPU.
#pragma once

namespace epigemm {

struct Device {
  int index = -1;      // CUDA's; -1: a device that is only described
  int capability = 0;  // 90 = sm_90; 0 = not a CUDA device
  int multiprocessors = 0;
  double clock_mhz = 0;            // the multiprocessors' highest
  double memory_bytes_per_us = 0;  // what a copy reaches, reads and writes counted
  double l2_bytes = 0;             // 0: not known
  // Tensor cores with fp32 sums at half the rate of fp16 sums: GeForce. There is no attribute for it, so the name is
  // used.
  bool has_half_rate_sums = false;

  bool is_speed_assumed = false;  // the device does not report its clock or its memory's speed
};

// The share of the memory's nominal bandwidth that a copy reaches: 0.890 on an H200, 0.904 on an H100.
constexpr double kReachableBandwidth = 0.89;

// A device of unknown speed counts as an H100 of as many multiprocessors.
inline Device with_assumed_speed(Device device) {
  constexpr double kClockMhz = 1980, kMemoryBytesPerUsAndMultiprocessor = 23e3;
  if (device.clock_mhz <= 0) {
    device.clock_mhz = kClockMhz;
    device.is_speed_assumed = true;
  }
  if (device.memory_bytes_per_us <= 0) {
    device.memory_bytes_per_us = kMemoryBytesPerUsAndMultiprocessor * device.multiprocessors;
    device.is_speed_assumed = true;
  }
  return device;
}

}  // namespace epigemm
