// A fused plan on copies of what its kernels cannot address (gemm/planner/copies.h).
#pragma once

#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm::call {

// Enqueues the kernels of the plan, with the kernels before and behind them that make problem.copies. `workspace` has
// copies_bytes(problem) bytes. Returns nullptr, or what was refused and why.
const char* launch_on_copies(const Problem& problem, const Plan& plan, const open::Kernels& kernels, void* workspace);

}  // namespace epigemm::call
