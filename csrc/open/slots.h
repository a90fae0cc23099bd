// A call's operands as an open kernel takes them: each in its slot (contract.h).
#pragma once

#include "epilogue/registry.h"
#include "open/contract.h"

namespace epigemm::open {

// `values`: in the epilogue's order, the accumulator left out; vectors without gaps.
template <class Compute>
Operands<Compute> by_slot(const EpilogueInfo& epilogue, const OperandValue* values);

}  // namespace epigemm::open
