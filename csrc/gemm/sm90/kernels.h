// The table of Hopper kernels: one launch function per epilogue and element type, each in a generated unit of its own.
#pragma once

#include "gemm/problem.h"

namespace epigemm::sm90 {

// Enqueues the kernel that `plan` names on the problem's stream. Returns nullptr, or what CUTLASS refused and why.
using Launch = const char* (*)(Problem const&, Plan const&);

// nullptr when there is no fused kernel for this epilogue and element type.
Launch find_launch(EpilogueId epilogue, ElementType element);

int kernel_count();

}  // namespace epigemm::sm90
