// The arguments of a linear call, as the operators take them: checked, and turned into what csrc/call decides on.
#pragma once

#include <string>

#include "call/decide.h"
#include "link/kernels.h"
#include "torch/arguments.h"

namespace epigemm::binding {

constexpr const char* kNoGemmKernels = "epigemm was built without the Hopper GEMM kernels";

struct PreparedCall {
  call::Prepared prepared;
  std::string not_representable;  // why the kernels cannot read or write the tensors as they lie
};

// `out`: null, the result is a new contiguous tensor.
PreparedCall prepare(const Name& epilogue, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, const TensorView* out);

// The names, between commas, of those kernels that were not linked yet.
template <class Names>
std::string missing_of(EpilogueId epilogue, const Names& names) {
  std::string missing;
  for (const open::KernelName name : names) {
    if (!link::find(epilogue, name)) missing += (missing.empty() ? "" : ",") + std::string(name);
  }
  return missing;
}

// Launches the kernels of a fused plan, which are linked.
void launch_fused(Problem& problem, const Plan& plan);

}  // namespace epigemm::binding
