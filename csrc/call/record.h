// A dry run of a linear call: what would be launched, and the reasons that Python would have to deal with first.
#pragma once

#include <string>
#include <vector>

#include "call/decide.h"
#include "call/torch.h"

namespace epigemm::call {

struct Record {
  bool wants_tried = false;     // set by the caller: whether to try every arithmetic
  std::vector<Answer> reasons;  // the reasons on the way, in order
  Prepared prepared;
  Decision decision;
  Gemm gemm = Gemm::Product;         // what PyTorch's GEMM does in the fallback
  std::vector<Tried> tried;          // every arithmetic of the call's order
  std::vector<std::string> missing;  // open kernels that the epilogue was not linked into; all, of a GPU elsewhere
  // In order: "copy" (of x and the weight, or of the result), "fused", "torch_gemm", "elementwise". On fp16 slices:
  // "split_of_weight" or "scales_of_weight", "split_of_x", and behind the GEMM "fixup". What PyTorch copies:
  // "copy_of_operands", "copy_of_x", "copy_of_result". Of column statistics: "blocks", of rows, where the plan's kernel
  // does not reduce them, and "merge".
  std::vector<const char*> launches;
};

}  // namespace epigemm::call
