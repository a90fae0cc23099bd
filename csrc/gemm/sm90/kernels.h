// The table of Hopper kernels that multiply tensors as they are: for the large tiles and for the narrow ones, one
// launch function per epilogue and element type, each in a generated unit of its own.
#pragma once

#include "gemm/problem.h"

namespace epigemm::sm90 {

// Enqueues the kernel that `plan` names on the problem's stream. Returns nullptr, or what was refused and why.
using Launch = const char* (*)(Problem const&, Plan const&);

// The launch of a tile (tiles.h, narrow/tiles.h); nullptr when there is no fused kernel for this epilogue and element
// type.
Launch find_launch(EpilogueId epilogue, ElementType element, int tile);

int kernel_count();

}  // namespace epigemm::sm90
