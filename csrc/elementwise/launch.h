// Launching the elementwise kernels. Callable without CUDA headers. `kernel`: of this kind, for the problem's element
// type. They return nullptr, or what was refused and why.
#pragma once

#include "elementwise/kernels.h"
#include "elementwise/problem.h"

namespace epigemm::cuda {

const char* launch_elementwise(const ElementwiseProblem& problem, const KernelForms& kernel);
const char* launch_strided(const StridedProblem& problem, const KernelForms& kernel);

// The kernel that sums columns if `partial_sums` is given, else the other one.
const char* launch_derivative(const DerivativeProblem& problem, const KernelForms& kernel);

}  // namespace epigemm::cuda
