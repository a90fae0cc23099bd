// The open kernels of this build, and the ones that epilogues were linked into. Callable without CUDA headers.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "gemm/problem.h"
#include "link/open.h"

namespace epigemm::link {

// What an open kernel computes. The families' stand beside FamilyId in the same order.
enum class Part : int {
  sm90_tma,
  sm90_swap_ab,
  sm90_fp16x3,
  fixup,        // behind sm90_fp16x3: what the range check rejected
  fp32,         // the whole product in fp32 multiply-adds
  elementwise,  // the epilogue alone
  derivative,   // its derivatives
};

// One open kernel.
struct KernelKey {
  Part part = Part::elementwise;
  ElementType element = ElementType::Float32;  // of x
  Arithmetic arithmetic = Arithmetic::IEEE;    // sm90_fp16x3: Split or Scaled
  int tile = 0;
  bool has_matrix_by_tma = false;  // sm90_tma: the first matrix comes with the loads of the mainloop's warp
};

// What `launch` says of an epilogue that `find` does not know.
constexpr const char* kNotLinked = "the epilogue was not linked for this kernel";

// The kernel's symbol: "epigemm_open_sm90_tma_bfloat16_0_matrix". epigemm/ir/index.json says which file has its IR.
std::string name(const KernelKey& key);

// The GEMM kernel that a fused plan asks for.
KernelKey key_of(const Problem& problem, const Plan& plan);

// The kernel with this epilogue in it: a cudaKernel_t. Null where it was not linked yet.
const void* find(EpilogueId epilogue, const KernelKey& key);

// Loads a linked kernel. Returns nullptr, or what the driver refused and why. A kernel that is loaded already stays.
const char* add(EpilogueId epilogue, const KernelKey& key, const void* cubin, std::size_t bytes);

// The kernel of this symbol, if one may have it.
std::optional<KernelKey> key_named(std::string_view symbol);

// A call's operands by slot: vectors without gaps.
template <class Compute>
Operands<Compute> by_slot(const EpilogueInfo& epilogue, const OperandValue* values);

// A problem's.
Operands<float> operands_of(const Problem& problem);

}  // namespace epigemm::link
