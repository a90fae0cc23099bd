// Chooses how autograd records a linear call: by a node of epigemm, or by PyTorch's own operators.
#pragma once

#include "call/linear.h"

namespace epigemm::call {

// NotReady, Recorded, or RecordedByTorch. The last one if PyTorch's operators give the same result and the same
// gradients, no product of the layer would run on a fused kernel, and a node of ours takes the host longer than it
// saves the device.
Answer recorder_of(const LinearCall& call);

}  // namespace epigemm::call
