// A dry run of a linear call: what would be launched, and what would have to be mended first.
#pragma once

#include <string>
#include <vector>

#include "call/decide.h"
#include "call/torch.h"

namespace epigemm::call {

// Launches of a linear call, in its order. A copy is one of x and the weight, or one of the result. What a fused plan
// on fp16 slices launches around its GEMM is its family's.
enum class Launch { Fold, Copy, Fused, TorchGemm, Elementwise };

struct Record {
  bool wants_tried = false;     // set by who asks: whether every arithmetic is to be tried
  std::vector<Answer> reasons;  // what stands in the way, in the order in which the call comes by
  Prepared prepared;
  Decision decision;
  Gemm gemm = Gemm::Product;         // what PyTorch's GEMM does in the fallback
  std::vector<Tried> tried;          // every arithmetic of the call's order
  std::vector<std::string> missing;  // open kernels that the epilogue was not linked into
  std::vector<Launch> launches;
};

}  // namespace epigemm::call
