// A functor of csrc/epilogue in the form in which an elementwise kernel calls one (open::Linked is the other): its
// operands in the slots of open/contract.h, and its derivative by dual numbers.
#pragma once

#include <type_traits>
#include <utility>

#include "epilogue/dual.h"  // before the functors

#include "open/epilogue.cuh"

namespace epigemm::cuda {

// The type in which functors compute: fp64 for fp64, a type of epilogue/rounded.h where the result has 16 bits, else
// fp32.
template <class Element>
struct ArgumentOf {
  using type = std::conditional_t<sizeof(Element) == 2, Rounded, typename ComputeType<Element>::type>;
};
template <>
struct ArgumentOf<__nv_bfloat16> {
  using type = RoundedToBFloat16;
};

template <class Functor, class Element>
class Compiled {
  using Compute = typename ComputeType<Element>::type;
  using Number = typename ArgumentOf<Element>::type;
  using Values = const Compute (&)[open::kSlots];
  using Indices = std::make_integer_sequence<int, Functor::operands.size() - 1>;  // beside the accumulator

  // The operands of a kind take its slots in order.
  static constexpr int slot_of(int index) {
    int slot = open::first_slot(Functor::operands[index].kind);
    for (int i = 1; i < index; ++i) slot += Functor::operands[i].kind == Functor::operands[index].kind;
    return slot;
  }
  template <int Index>
  static constexpr int kSlot = slot_of(Index + 1);
  template <int Index>
  static constexpr int kRead =
      Functor::operands[Index + 1].element == OperandElement::Input ? open::kOfElement : open::kOfCompute;

  template <int... Index>
  __device__ __forceinline__ static int read_of(int slot, std::integer_sequence<int, Index...>) {
    return ((slot == kSlot<Index> ? kRead<Index> : 0) + ... + open::kUnread);
  }

  template <int... Index>
  __device__ __forceinline__ static Compute apply(Compute acc, Values values, std::integer_sequence<int, Index...>) {
    return static_cast<Compute>(Functor::apply(Number(acc), Number(values[kSlot<Index>])...));
  }

  // The variable's derivative is grad rather than 1: so relu selects it, and a division divides it, as torch's own
  // derivatives do.
  __device__ __forceinline__ static Dual<Number> dual(Compute value, Compute grad, bool is_variable) {
    return is_variable ? Dual<Number>(Number(value), Number(grad)) : Dual<Number>(Number(value));
  }

  template <int... Index>
  __device__ __forceinline__ static Compute derive(Compute grad, Compute acc, Values values, int slot,
                                                   std::integer_sequence<int, Index...>) {
    return static_cast<Compute>(
        Functor::apply(dual(acc, grad, slot == -1), dual(values[kSlot<Index>], grad, slot == kSlot<Index>)...)
            .derivative);
  }

 public:
  static constexpr bool kHasWideAccumulator = false;
  static constexpr bool kReadsColumns = reads<Functor>(OperandKind::PerColumn);

  __device__ __forceinline__ static int operand(int slot) { return read_of(slot, Indices{}); }
  __device__ __forceinline__ static bool shares_rows(int) { return false; }
  // Scalars. The gradient of a bias is the sum of the accumulator's.
  __device__ __forceinline__ static bool is_derived(int slot) {
    return slot >= open::kScalar0 && slot < open::kScalar0 + open::kScalars && operand(slot) != open::kUnread;
  }

  struct Result {
    __device__ __forceinline__ static Compute of(Compute acc, Values values) { return apply(acc, values, Indices{}); }
    __device__ __forceinline__ static Compute near(Compute acc, Values values, bool&) { return of(acc, values); }
    __device__ __forceinline__ static bool has_far() { return false; }
  };

  __device__ __forceinline__ static Compute derivative(Compute grad, Compute acc, Values values, int slot) {
    return derive(grad, acc, values, slot, Indices{});
  }
};

}  // namespace epigemm::cuda
