// Launching the elementwise kernels. Callable without CUDA headers. `kernel`: a handle or a host's address, of the
// kernel of this kind (kernels.h) for the problem's element type. They return nullptr, or what was refused and why.
#pragma once

#include "elementwise/problem.h"

namespace epigemm::cuda {

const char* launch_elementwise(const ElementwiseProblem& problem, const void* kernel);
const char* launch_strided(const StridedProblem& problem, const void* kernel);

// The kernel that sums columns if `partial_sums` is given, else the other one.
const char* launch_derivative(const DerivativeProblem& problem, const void* kernel);

}  // namespace epigemm::cuda
