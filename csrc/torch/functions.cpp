// epigemm::_call_functions and _set_ready: the functions of csrc/call for the entry (csrc/python), and the devices on
// which it may be used.
#include "call/functions.h"

#include <torch/csrc/stable/library.h>

#include "call/operands.h"
#include "torch/stable_torch.h"

namespace epigemm::binding {
namespace {

int64_t call_functions() {
  static constexpr call::Functions functions = {
      /*linear=*/&call::linear,
      /*elementwise=*/&call::elementwise,
      /*derivative=*/&call::derivative,
      /*recorder_of=*/&call::recorder_of,
      /*read_slices=*/&call::read_slices,
      /*read_forced=*/&call::read_forced,
  };
  return reinterpret_cast<int64_t>(&functions);
}

void set_ready(int64_t device) { call::set_ready(static_cast<int>(device)); }

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_set_ready", TORCH_BOX(&epigemm::binding::set_ready));
  m.impl("_call_functions", TORCH_BOX(&epigemm::binding::call_functions));
}
