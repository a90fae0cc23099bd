// The elementwise CUDA kernels, callable without CUDA headers.
#pragma once

#include "elementwise/problem.h"

namespace epigemm::cuda {

// Enqueues D = epilogue(x) on the problem's stream; the problem has been simplified. Check cuda::last_error()
// afterwards.
void launch(const ElementwiseProblem& problem);

// Enqueues the epilogue's derivative, times grad; as above.
void launch_derivative(const DerivativeProblem& problem);

}  // namespace epigemm::cuda
