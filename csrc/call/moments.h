// The column statistics of a linear call's result.
#pragma once

#include "call/linear.h"

namespace epigemm::call {

// Whether the call has moments, and the plan's kernel reduces the blocks of rows. Otherwise a kernel of its own does.
bool are_moments_in_kernel(const Problem& problem, const Plan& plan);

// Whether the blocks' moments stay in the call's own memory for them, unmerged.
bool are_blocks_left(const LinearCall& call, const Problem& problem, const Plan& plan);

// Bytes of a workspace for the blocks' moments; 0 if the call has none, or if they lie in the call's memory.
int64_t moments_bytes(const LinearCall& call, const Problem& problem, const Plan& plan);

// What the call launches behind its result D. Does nothing without moments. False after torch.raise().
bool run_moments(const LinearCall& call, const Plan& plan, const Problem& problem, const Matrix& d, void* blocks,
                 Torch& torch);

}  // namespace epigemm::call
