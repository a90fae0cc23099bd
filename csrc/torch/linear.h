// The arguments of a linear call, as the operators take them: checked, and turned into what csrc/call decides on.
#pragma once

#include <string>

#include "call/decide.h"
#include "torch/arguments.h"

namespace epigemm::binding {

struct PreparedCall {
  call::Prepared prepared;
  std::string not_representable;  // why the kernels cannot read or write the tensors as they lie
};

// `out`: null, the result is a new contiguous tensor.
PreparedCall prepare(const Name& epilogue, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, const TensorView* out);

// Launches one kernel on the tensors as they lie.
void launch_fused(Problem& problem, const Plan& plan);

}  // namespace epigemm::binding
