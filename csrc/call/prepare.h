// From tensors to the numbers that decide about a linear call. Each property is read and checked once.
#pragma once

#include "call/decide.h"
#include "call/linear.h"

namespace epigemm::call {

// Done, or why there is nothing to decide. For IsEmpty, too, everything is filled in.
Answer prepare(const LinearCall& call, Prepared* prepared);

}  // namespace epigemm::call
