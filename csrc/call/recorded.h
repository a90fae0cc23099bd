// Who records a linear call for autograd: a node of epigemm's, or PyTorch's own operators.
#pragma once

#include "call/linear.h"

namespace epigemm::call {

// NotReady, Recorded, or RecordedByTorch: PyTorch's operators give the same result and the same gradients, no product
// of the layer is one for a fused kernel, and the host takes longer over a node of ours than the device over what that
// saves.
Answer recorder_of(const LinearCall& call);

}  // namespace epigemm::call
