// The table of epilogues at run time: names, operands, costs. First come the built-in ones of registry.def; others are
// registered while the process runs, and get the next ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "epilogue/cost.h"
#include "epilogue/operands.h"

namespace epigemm {

// builtin.h has the names of the built-in ones. The first is `bias`.
enum class EpilogueId : int;

// The largest number of operands beside the accumulator, of a built-in epilogue and of one that is linked in (whose
// slots are in csrc/open/contract.h). They bound the arrays of operands that are passed as kernel arguments.
constexpr int kMaxBuiltinOperands = 4;
constexpr int kMaxOperands = 12;

// As Operand, but it owns its name.
struct RegisteredOperand {
  OperandKind kind;
  OperandElement element;
  std::string name;
  bool shares_rows = false;
};

struct EpilogueInfo {
  EpilogueId id;
  const char* name;
  const char* functor;      // a built-in one's struct, or null
  bool linear;              // may follow a product
  const Operand* operands;  // accumulator first
  int operand_count;        // accumulator included
  int bias;                 // the vector that is added to the accumulator before all else, and that a call may leave
                            // out; 0: there is none
  FunctorCost cost;         // the planner's measure of it
  bool has_store = false;   // whether it has a second value for each element (csrc/open/contract.h)
};

// Whether the package has compiled kernels that compute the epilogue without a product, and its derivative. It has them
// for the built-in epilogues. For others they are linked.
bool has_compiled_elementwise(EpilogueId id);

const EpilogueInfo* epilogues();                   // the built-in ones, in the order of registry.def
const EpilogueInfo& epilogue_info(EpilogueId id);  // by id
int first_matrix(const EpilogueInfo& epilogue);    // the place of the first matrix among the operands; 0: there is none
const EpilogueInfo* find_epilogue(const char* name, std::size_t length);  // nullptr when there is none of that name

// nullptr unless an epilogue has this number.
const EpilogueInfo* epilogue_at(int64_t index);

// An epilogue whose kernels are linked at run time. `operands`, which are copied, begin with the accumulator. `bias`,
// `has_store`: as of EpilogueInfo. `cost`: of the primitives that python/epigemm/epilogues/tracer/source.py counts. A
// name stands for one operand list and one functor: registering them again gives the same id. An entry is never moved
// or removed. Throws std::invalid_argument where the name is taken, std::length_error when the table is full.
EpilogueId register_epilogue(const std::string& name, const std::vector<RegisteredOperand>& operands, int bias,
                             const FunctorCost& cost, bool has_store = false);

// The value of one operand in one call.
struct OperandValue {
  const void* data = nullptr;  // vectors, matrices: null = absent; Scalar: a number on the device, null = by value
  int64_t stride = 0;          // elements from one column's or row's value to the next; Matrix: from row to row
  double value = 0;            // Scalar by value
  int64_t rows_each = 1;       // Matrix that shares rows: how many rows of the result read one row of it
};

}  // namespace epigemm
