// The kernels of one product on fp16 slices: the splits, a family's GEMM, and the fixup.
#pragma once

#include "gemm/fp16_slices/fixup.h"
#include "open/kernel_names.h"

namespace epigemm::fp16_slices {

// Enqueues a family's GEMM on slices. `kernel`: the plan's with the epilogue in it, a cudaKernel_t. Returns nullptr, or
// what was refused and why.
using LaunchGemm = const char* (*)(SplitProblem const& problem, Plan const& plan, const void* kernel);

// Enqueues the splits of x and of a weight without a pack, the GEMM and the fixup. `kernels`: the GEMM's and the
// fixup's. `problem.workspace` has workspace_bytes(problem) bytes. `block_rows`: as of FixupProblem.
const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels, LaunchGemm launch_gemm,
                   FixupStart fixup_start, int block_rows = 0);

// The same for a GEMM that reads the weight as it lies, and so makes no slices of it. `problem.workspace` has
// workspace_bytes_as_it_lies(problem) bytes.
const char* launch_as_it_lies(Problem const& problem, Plan const& plan, open::Kernels const& kernels,
                              LaunchGemm launch_gemm, int block_rows);

}  // namespace epigemm::fp16_slices
