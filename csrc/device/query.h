// Questions to the CUDA runtime about a device, callable without CUDA headers.
#pragma once

#include <string>

#include "device/device.h"

namespace epigemm::cuda {

// Attributes of a device, asked once and kept.
const Device& device(int index);

// Empty when this build's kernels can run on the device, else the reason.
std::string status(int index);

// The error of the latest launch, cleared; empty when there is none.
std::string last_error();

// The CUDA toolkit that built the kernels, as "13.0".
std::string toolkit_version();

}  // namespace epigemm::cuda
