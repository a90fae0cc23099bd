// Questions to the CUDA runtime about a device, callable without CUDA headers.
#pragma once

#include <string>

#include "device/device.h"

namespace epigemm::cuda {

// Attributes of a device, asked once and kept, with what was measured of it since.
const Device& device(int index);

// Has `device` tell these figures from now on; all 0: what the device tells itself. Safe beside calls of other threads.
void calibrate(int index, double memory_bytes_per_us, double tensor_flops_per_us, double cublas_efficiency);

// Empty when this build's kernels can run on the device, else the reason.
std::string status(int index);

// The error of the latest launch, cleared; empty when there is none.
std::string last_error();

// The CUDA toolkit that built the kernels, as "13.0".
std::string toolkit_version();

}  // namespace epigemm::cuda
