// Which open kernels a launch takes.
#pragma once

#include "link/kernels.h"

namespace epigemm::link {

struct Needed {
  KernelKey keys[2];
  int count = 0;

  void add(const KernelKey& key) { keys[count++] = key; }
};

// Of a linear call by this plan; the fallback's, where it is linked, follows PyTorch's GEMM.
Needed needed_kernels(const Problem& problem, const Plan& plan);

// Whether a launch may go ahead.
bool are_linked(EpilogueId epilogue, const Needed& needed);

}  // namespace epigemm::link
