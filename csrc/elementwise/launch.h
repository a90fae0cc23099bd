// The elementwise CUDA kernels and the device queries, callable without CUDA headers.
#pragma once

#include <string>

#include "elementwise/problem.h"

namespace epigemm::cuda {

// Enqueues D = epilogue(x) on the problem's stream; the problem has been simplified. Check last_error() afterwards.
void launch(const ElementwiseProblem& problem);

// Enqueues the epilogue's derivative, times grad; as above.
void launch_derivative(const DerivativeProblem& problem);

// The error of the latest launch, cleared; empty when there is none.
std::string last_error();

struct Device {
  int capability = 0;  // 90 = sm_90
  int multiprocessors = 0;
};

// Attributes of a device, asked once and kept.
const Device& device(int index);

// Empty when this build's kernels can run on the device, else the reason.
std::string status(int index);

// The CUDA toolkit that built the kernels, as "13.0".
std::string toolkit_version();

}  // namespace epigemm::cuda
