// A generation of GPUs for the planner: the predicted times of cuBLAS as PyTorch calls it. Plain C++.
#pragma once

#include "gemm/problem.h"

namespace epigemm {

class Architecture {
 public:
  virtual ~Architecture() = default;

  virtual bool is_of(const Device&) const = 0;

  // The product alone (torch.mm), or with a bias (torch.addmm). fp32 problems run in TF32 if that is allowed, else in
  // plain fp32.
  virtual double product_microseconds(const Problem&) const = 0;
  virtual double product_with_bias_microseconds(const Problem&) const = 0;

  // The time with a bias and a ReLU (torch._addmm_activation), over that with a bias.
  virtual double relu_factor(const Problem&, double /*with_bias_us*/) const { return 1; }

  // Whether cuBLAS's product with a bias is slower than its plain product and an elementwise kernel.
  virtual bool adds_bias_apart(const Problem&) const = 0;

  // The least predicted gain over the fallback that a fused kernel must have for any problem. It is larger if the
  // figures are assumptions.
  virtual double least_gain() const { return 0; }
};

// The architecture of a device; for one that is not listed, the first of the list.
const Architecture& architecture_of(const Device& device);

#define EPIGEMM_ARCHITECTURE(name)    \
  namespace name {                    \
  const Architecture& architecture(); \
  }
#include "gemm/architectures.def"
#undef EPIGEMM_ARCHITECTURE

}  // namespace epigemm
