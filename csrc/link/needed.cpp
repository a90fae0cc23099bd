#include "link/needed.h"

namespace epigemm::link {

Needed needed_kernels(const Problem& problem, const Plan& plan) {
  Needed needed;
  if (!plan.is_fused()) {
    if (!has_compiled_elementwise(problem.epilogue)) needed.add({Part::elementwise, problem.x.element});
    return needed;
  }
  needed.add(key_of(problem, plan));
  if (needed.keys[0].part == Part::sm90_fp16x3) needed.add({Part::fixup});
  return needed;
}

bool are_linked(EpilogueId epilogue, const Needed& needed) {
  for (int i = 0; i < needed.count; ++i) {
    if (!find(epilogue, needed.keys[i])) return false;
  }
  return true;
}

}  // namespace epigemm::link
