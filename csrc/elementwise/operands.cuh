// How a plain CUDA kernel reads the operands of an epilogue.
#pragma once

#include <type_traits>
#include <utility>

#include "device/types.cuh"

namespace epigemm::cuda {

// What the epilogue needs besides x.
template <class Compute>
struct Operands {
  const void* data[kMaxBuiltinOperands];
  Compute values[kMaxBuiltinOperands];
};

template <class Functor, class Element, int Index>
struct OperandTraits {
  static constexpr Operand operand = Functor::operands[Index];
  using Compute = typename ComputeType<Element>::type;
  using Stored = std::conditional_t<operand.element == OperandElement::Input, Element, Compute>;
};

// A scalar is the same for every element; a vector's value follows its offset.
template <class Functor, class Element, int Index, class Compute>
__device__ __forceinline__ Compute load_operand(const Operands<Compute>& operands, int64_t offset) {
  using Traits = OperandTraits<Functor, Element, Index>;
  const auto* data = static_cast<const typename Traits::Stored*>(operands.data[Index - 1]);
  if constexpr (Traits::operand.kind == OperandKind::Scalar) {
    return data ? to_compute(*data) : operands.values[Index - 1];
  } else {
    return data ? to_compute(data[offset]) : Compute(0);
  }
}

// The operands beside the accumulator, by their index in the functor's list.
template <class Functor>
using OperandIndices = std::make_integer_sequence<int, static_cast<int>(Functor::operands.size()) - 1>;

}  // namespace epigemm::cuda
