// A generation of GPUs, as the planner sees it beside the families: what cuBLAS is expected to take there, as PyTorch
// calls it. Plain C++.
#pragma once

#include "gemm/problem.h"

namespace epigemm {

class Architecture {
 public:
  virtual ~Architecture() = default;

  virtual bool is_of(const Device&) const = 0;

  // The product alone (torch.mm), or with a bias and perhaps a ReLU in it (torch.addmm, torch._addmm_activation). For
  // fp32 problems in TF32 where that is allowed, else in plain fp32.
  virtual double product_microseconds(const Problem&) const = 0;
  virtual double product_with_bias_microseconds(const Problem&) const = 0;

  // Whether cuBLAS's product with a bias is slower than its plain product and an elementwise kernel.
  virtual bool adds_bias_apart(const Problem&) const = 0;

  // How much faster than the fallback a fused kernel must be predicted to be at least, whatever the problem: more where
  // the figures are assumed.
  virtual double least_gain() const { return 0; }
};

// The architecture of a device; of one that is not listed, the first of the list stands in.
const Architecture& architecture_of(const Device& device);

#define EPIGEMM_ARCHITECTURE(name)    \
  namespace name {                    \
  const Architecture& architecture(); \
  }
#include "gemm/architectures.def"
#undef EPIGEMM_ARCHITECTURE

}  // namespace epigemm
