// The epilogues at run time: names, operand lists, forms; built from registry.def alone.
#pragma once

#include <cstdint>

#include "epilogue/operands.h"

namespace epigemm {

enum class EpilogueId : int {
#define EPIGEMM_EPILOGUE(name, Functor, forms) name,
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
};

constexpr int kEpilogueCount = 0
#define EPIGEMM_EPILOGUE(name, Functor, forms) +1
#include "epilogue/registry.def"
#undef EPIGEMM_EPILOGUE
    ;

// The accumulator not counted: of a built-in epilogue, and of one that is linked in (csrc/link/open.h has its slots).
// They bound the operand arrays that travel as kernel arguments.
constexpr int kMaxBuiltinOperands = 4;
constexpr int kMaxOperands = 12;

struct EpilogueInfo {
  EpilogueId id;
  const char* name;
  bool linear;              // has fused GEMM kernels
  const Operand* operands;  // accumulator first
  int operand_count;        // accumulator included
  bool takes_bias;          // its first operand is one: a vector that a call may leave out
  bool is_transcendental;   // its `apply` calls exp or the like: what its epilogue costs (a functor says so of itself)
};

const EpilogueInfo* epilogues();                   // kEpilogueCount of them, in the order of registry.def
const EpilogueInfo& epilogue_info(EpilogueId id);  // by id
const EpilogueInfo* find_epilogue(const char* name, std::size_t length);  // nullptr when there is none of that name

// The value of one operand in one call.
struct OperandValue {
  const void* data = nullptr;  // vectors, matrices: null = absent; Scalar: a number on the device, null = by value
  int64_t stride = 0;          // elements from one column's or row's value to the next; Matrix: from row to row
  double value = 0;            // Scalar by value
};

}  // namespace epigemm
