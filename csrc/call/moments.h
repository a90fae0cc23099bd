// The statistics of the columns of a linear call's result.
#pragma once

#include "call/linear.h"

namespace epigemm::call {

// Whether the call wants moments, and the plan's kernel reduces the blocks. Otherwise a kernel of its own does.
bool are_moments_in_kernel(const Problem& problem, const Plan& plan);

// Whether the moments of the blocks stay in the call's own memory for them, unmerged.
bool are_blocks_left(const LinearCall& call, const Problem& problem, const Plan& plan);

// Bytes of a workspace for the moments of the blocks. They may lie in the call's memory.
int64_t moments_bytes(const LinearCall& call, const Problem& problem, const Plan& plan);

// Where they lie; null: there are none.
void* place_blocks(const LinearCall& call, const Problem& problem, const Plan& plan, char* workspace);

// What the call launches behind its result D. Does nothing without moments. False after torch.raise().
bool run_moments(const LinearCall& call, const Plan& plan, const Problem& problem, const Matrix& d, void* blocks,
                 Torch& torch);

}  // namespace epigemm::call
