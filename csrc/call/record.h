// A dry run of a linear call: what would be launched, and the reasons that Python would have to deal with first.
#pragma once

#include <string>
#include <vector>

#include "call/decide.h"
#include "call/torch.h"

namespace epigemm::call {

// The launches of a linear call, in order. Copy: of x and the weight, or of the result. Fused: with everything that a
// plan on fp16 slices launches around its GEMM. Blocks, Merge: column statistics, of blocks of rows where the plan's
// kernel does not reduce them, and of all.
enum class Launch { Fold, Copy, Fused, TorchGemm, Elementwise, Blocks, Merge };

struct Record {
  bool wants_tried = false;     // set by the caller: whether to try every arithmetic
  std::vector<Answer> reasons;  // the reasons on the way, in order
  Prepared prepared;
  Decision decision;
  Gemm gemm = Gemm::Product;         // what PyTorch's GEMM does in the fallback
  std::vector<Tried> tried;          // every arithmetic of the call's order
  std::vector<std::string> missing;  // open kernels that the epilogue was not linked into; all, of a GPU elsewhere
  std::vector<Launch> launches;
};

}  // namespace epigemm::call
