// What open kernels call (contract.h), made of a built-in functor:
//
//   EPIGEMM_LINKED_FUNCTOR(BiasReLU, float)
//
// In place of float, Rounded is for fp16 results and RoundedToBFloat16 for bf16 results. Built-in functors call no
// function that has a near form.
//
// Compiled by nvcc with the package, and by NVRTC at first use, which has no C++ library.
#pragma once

#include "epilogue/primitives.h"  // before the functor
#include "open/contract.h"

namespace epigemm::open {

// The slot of an operand by its position in the functor's list: operands of a kind have that kind's slots, in order.
template <class Functor>
EPIGEMM_HOST_DEVICE constexpr int slot_of(int place) {
  int slot = first_slot(Functor::operands[place].kind);
  for (int i = 1; i < place; ++i) slot += Functor::operands[i].kind == Functor::operands[place].kind ? 1 : 0;
  return slot;
}

// The result of `epigemm_operand` for a slot.
template <class Functor, int Place = 1>
__device__ __forceinline__ int kind_of_slot(int slot) {
  if constexpr (Place < Functor::operands.size()) {
    constexpr int of_place = slot_of<Functor>(Place);
    constexpr int kind = Functor::operands[Place].element == OperandElement::Input ? kOfElement : kOfCompute;
    return slot == of_place ? kind : kind_of_slot<Functor, Place + 1>(slot);
  } else {
    return kUnread;
  }
}

// Functor::apply for the accumulator and the operands, which `number` makes from their values and slots.
template <class Functor, int Place = 1, class Make, class... Numbers>
__device__ __forceinline__ auto apply_functor(const Make& make, Numbers... numbers) {
  if constexpr (Place < Functor::operands.size()) {
    constexpr int slot = slot_of<Functor>(Place);
    return apply_functor<Functor, Place + 1>(make, numbers..., make(slot));
  } else {
    return Functor::apply(numbers...);
  }
}

// Values of T, converted to Number, to which the functor is applied.
template <class Number, class T>
struct Values {
  const T* values;

  __device__ __forceinline__ Number operator()(int slot) const { return Number(values[slot]); }
};

// Values as dual numbers: for the derivative by the operand in a slot, or by the accumulator (slot -1).
template <class T>
struct Duals {
  const T* values;
  int by;

  __device__ __forceinline__ Dual<T> operator()(int slot) const { return of(values[slot], slot); }
  __device__ __forceinline__ Dual<T> of(T value, int slot) const { return Dual<T>(value, T(slot == by), slot != by); }
};

template <class Functor, class T>
__device__ __forceinline__ T slope_of(T acc, const T* values, int by) {
  const Duals<T> make{values, by};
  const Dual<T> result = apply_functor<Functor>(make, make.of(acc, -1));
  return result.constant ? T(0) : result.derivative;
}

// --- four elements -------------------------------------------------------------------------------------------------

// Whether the functor is long: with float's functions one is that calls any (`primitives`).
template <class Functor, class Number, class = void>
constexpr bool kIsLong = false;
template <class Functor>
constexpr bool kIsLong<Functor, float, decltype(static_cast<void>(Functor::primitives))> = true;

struct Four {
  float of[4];
};

// The values of one element by slot, from four of each operand in turn.
template <class Functor, int Place = 1>
__device__ __forceinline__ void take_values(const float* given, int element, float* by_slot) {
  if constexpr (Place < Functor::operands.size()) {
    by_slot[slot_of<Functor>(Place)] = given[(Place - 1) * 4 + element];
    take_values<Functor, Place + 1>(given, element, by_slot);
  }
}

template <class Functor, class... Floats>
__device__ __noinline__ Four four_apart(float acc_0, float acc_1, float acc_2, float acc_3, Floats... values) {
  const float accs[] = {acc_0, acc_1, acc_2, acc_3}, given[] = {values..., 0.0f};
  Four found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float by_slot[kSlots];
    take_values<Functor>(given, i, by_slot);
    found.of[i] = apply_functor<Functor>(Values<float, float>{by_slot}, accs[i]);
  }
  return found;
}

// Hands over the operands' values from their slots.
template <class Functor, int Place = 1, class... Floats>
__device__ __forceinline__ Four four_of(const float* accs, const float* values, Floats... given) {
  if constexpr (Place < Functor::operands.size()) {
    constexpr int slot = slot_of<Functor>(Place);
    const float* const v = values + slot;
    return four_of<Functor, Place + 1>(accs, values, given..., v[0], v[kSlots], v[2 * kSlots], v[3 * kSlots]);
  } else {
    return four_apart<Functor>(accs[0], accs[1], accs[2], accs[3], given...);
  }
}

template <class Functor, class Number>
__device__ __forceinline__ void apply_to_four(const float* accs, const float* values, float* results) {
  if constexpr (kIsLong<Functor, Number>) {
    const Four found = four_of<Functor>(accs, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) results[i] = found.of[i];
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Values<Number, float> make{values + i * kSlots};
      results[i] = static_cast<float>(apply_functor<Functor>(make, Number(accs[i])));
    }
  }
}

}  // namespace epigemm::open

#define EPIGEMM_LINKED_FUNCTOR(Functor, Number)                                                                       \
  extern "C" __device__ int epigemm_operand(int slot) { return epigemm::open::kind_of_slot<Functor>(slot); }          \
  extern "C" __device__ bool epigemm_shares_rows(int) { return false; }                                               \
  extern "C" __device__ float epigemm_apply(float acc, EPIGEMM_SLOTS(float)) {                                        \
    const float values[] = {EPIGEMM_VALUES};                                                                          \
    const epigemm::open::Values<Number, float> make{values};                                                          \
    return static_cast<float>(epigemm::open::apply_functor<Functor>(make, Number(acc)));                              \
  }                                                                                                                   \
  extern "C" __device__ float epigemm_apply_near(float acc, EPIGEMM_SLOTS(float), bool&) {                            \
    return epigemm_apply(acc, EPIGEMM_VALUES);                                                                        \
  }                                                                                                                   \
  extern "C" __device__ bool epigemm_has_far() { return false; }                                                      \
  extern "C" __device__ bool epigemm_has_store() { return false; }                                                    \
  extern "C" __device__ float epigemm_store(float, EPIGEMM_SLOTS(float)) { return 0; }                                \
  extern "C" __device__ float epigemm_store_near(float, EPIGEMM_SLOTS(float), bool&) { return 0; }                    \
  extern "C" __device__ bool epigemm_has_far_store() { return false; }                                                \
  extern "C" __device__ void epigemm_apply_four(const float* accs, const float* values, float* results) {             \
    epigemm::open::apply_to_four<Functor, Number>(accs, values, results);                                             \
  }                                                                                                                   \
  extern "C" __device__ void epigemm_apply_near_four(const float* accs, const float* values, float* results, bool&) { \
    epigemm_apply_four(accs, values, results);                                                                        \
  }                                                                                                                   \
  extern "C" __device__ double epigemm_apply_double(double acc, EPIGEMM_SLOTS(double)) {                              \
    const double values[] = {EPIGEMM_VALUES};                                                                         \
    const epigemm::open::Values<double, double> make{values};                                                         \
    return epigemm::open::apply_functor<Functor>(make, acc);                                                          \
  }                                                                                                                   \
  extern "C" __device__ float epigemm_slope(float acc, EPIGEMM_SLOTS(float), int slot) {                              \
    const float values[] = {EPIGEMM_VALUES};                                                                          \
    return epigemm::open::slope_of<Functor>(acc, values, slot);                                                       \
  }                                                                                                                   \
  extern "C" __device__ double epigemm_slope_double(double acc, EPIGEMM_SLOTS(double), int slot) {                    \
    const double values[] = {EPIGEMM_VALUES};                                                                         \
    return epigemm::open::slope_of<Functor>(acc, values, slot);                                                       \
  }
