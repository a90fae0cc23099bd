// Puts a call's operands into the slots of an open kernel (contract.h).
#pragma once

#include "epilogue/registry.h"
#include "open/contract.h"

namespace epigemm::open {

// `values`: in the epilogue's order, without the accumulator; vectors have no gaps.
template <class Compute>
Operands<Compute> by_slot(const EpilogueInfo& epilogue, const OperandValue* values);

}  // namespace epigemm::open
