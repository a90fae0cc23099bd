// The open kernels by name: the symbol of each, "epigemm_open_sm90_tma_bfloat16_0_matrix". epigemm/ir/index.json says
// which file has its IR. The owner of a kernel names it: a family of GEMM kernels, or csrc/elementwise.
#pragma once

#include <string_view>

namespace epigemm::open {

// Names have static lifetime.
using KernelName = std::string_view;

// The open kernels of one launch, in the launch's order.
struct KernelNames {
  static constexpr int kMost = 2;

  KernelName names[kMost];
  int count = 0;

  void add(KernelName name) { names[count++] = name; }
  const KernelName* begin() const { return names; }
  const KernelName* end() const { return names + count; }
};

// The same, with an epilogue linked in: handles (cudaKernel_t) in the order of the names.
struct Kernels {
  const void* handles[KernelNames::kMost] = {};
};

}  // namespace epigemm::open
