// The statistics of a linear call's result: of its columns, and of its rows.
#pragma once

#include "call/linear.h"

namespace epigemm::call {

// Whether the call wants moments, and the plan's kernel reduces the blocks. Otherwise a kernel of its own reduces those
// of columns, if the call needs them.
bool are_moments_in_kernel(const Problem& problem, const Plan& plan);

// Whether the call gives the moments of the columns, or of the rows.
bool has_column_moments(const LinearCall& call, const Problem& problem, const Plan& plan);
bool has_row_moments(const LinearCall& call, const Problem& problem, const Plan& plan);

// Whether the moments of the columns' blocks stay in the call's own memory for them, unmerged.
bool are_blocks_left(const LinearCall& call, const Problem& problem, const Plan& plan);

// Where the moments of the blocks lie; null: there are none.
struct MomentBlocks {
  void *of_columns = nullptr, *of_rows = nullptr;
};

// Bytes of a workspace for them. Those of columns may lie in the call's memory.
int64_t moments_bytes(const LinearCall& call, const Problem& problem, const Plan& plan);

MomentBlocks place_blocks(const LinearCall& call, const Problem& problem, const Plan& plan, char* workspace);

// What the call launches behind its result D. Does nothing without moments. False after torch.raise().
bool run_moments(const LinearCall& call, const Plan& plan, const Problem& problem, const Matrix& d,
                 const MomentBlocks& blocks, Torch& torch);

}  // namespace epigemm::call
