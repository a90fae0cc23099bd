#include "open/slots.h"

namespace epigemm::open {

static_assert(kSlots <= kMaxOperands, "an operand a slot");

template <class Compute>
Operands<Compute> by_slot(const EpilogueInfo& epilogue, const OperandValue* values) {
  Operands<Compute> operands{};
  int counts[kOperandKinds] = {};
  for (int i = 1; i < epilogue.operand_count; ++i) {  // the accumulator takes no slot
    const OperandKind kind = epilogue.operands[i].kind;
    const OperandValue& value = values[i - 1];
    const int number = counts[static_cast<int>(kind)]++;
    operands.data[first_slot(kind) + number] = value.data;
    if (kind == OperandKind::Scalar) operands.scalars[number] = static_cast<Compute>(value.value);
    if (kind == OperandKind::Matrix) operands.matrix_strides[number] = value.stride;
    if (epilogue.operands[i].shares_rows) operands.shared_rows[number] = SharedRows::by(value.rows_each);
  }
  return operands;
}

template Operands<float> by_slot<float>(const EpilogueInfo&, const OperandValue*);
template Operands<double> by_slot<double>(const EpilogueInfo&, const OperandValue*);

}  // namespace epigemm::open
