// The functions of contract.h, by a functor: `Functor::apply(acc, operands...)`. What is linked into an open kernel is
// the text of a functor and a few lines behind it (epigemm/epilogues/tracer/source.py): which slots it reads, and
// EPIGEMM_DEFINE_... of what the kernel calls.
#pragma once

#include "epilogue/dual.h"
#include "epilogue/primitives.h"
#include "open/contract.h"

namespace epigemm::open {

EPIGEMM_HOST_DEVICE float value_of(float x) { return x; }
EPIGEMM_HOST_DEVICE double value_of(double x) { return x; }
template <int Digits>
EPIGEMM_HOST_DEVICE float value_of(RoundedTo<Digits> x) {
  return x.value;
}

// Bits of an element's number, 2 r + c of row r and column c, by which its value of a slot differs from others'.
EPIGEMM_HOST_DEVICE constexpr int bits_of(int slot) {
  return slot < kScalar0 ? 1 : slot < kRow0 ? 0 : slot < kMatrix0 ? 2 : 3;
}

// A functor whose operands have these slots, computed in `Number`: double, float, or one with shorter functions.
// `HasFar`: whether these have a near form, whose last argument is `is_far`. `slots`: a value for each slot.
template <class Functor, class Number, bool HasFar, int... Slots>
struct Applied {
  static constexpr bool exists = true, has_far = HasFar;

  template <class T, class... Far>
  EPIGEMM_HOST_DEVICE static T apply(T acc, const T* slots, Far&... is_far) {
    return value_of(Functor::apply(Number(acc), Number(slots[Slots])..., is_far...));
  }
  EPIGEMM_HOST_DEVICE static float near_form(float acc, const float* slots, bool& is_far) {
    if constexpr (HasFar) {
      return apply(acc, slots, is_far);
    } else {
      return apply(acc, slots);
    }
  }
  template <class T>
  EPIGEMM_HOST_DEVICE static T slope(T acc, const T* slots, int slot) {
    const Dual<T> result = Functor::apply(Dual<T>(acc, T(slot == -1), slot != -1),
                                          Dual<T>(slots[Slots], T(slot == Slots), slot != Slots)...);
    return result.constant ? T(0) : result.derivative;
  }
  // One of four elements. `values`: kSlots for each; those that others share are the first one's.
  template <class... Far>
  EPIGEMM_HOST_DEVICE static float element(int i, const float* accs, const float* values, Far&... is_far) {
    return value_of(
        Functor::apply(Number(accs[i]), Number(values[(i & bits_of(Slots)) * kSlots + Slots])..., is_far...));
  }
};

// The second value of a functor that has none.
struct Nothing {
  static constexpr bool exists = false, has_far = false;

  EPIGEMM_HOST_DEVICE static float apply(float, const float*) { return 0; }
  EPIGEMM_HOST_DEVICE static float near_form(float, const float*, bool&) { return 0; }
};

struct Results {
  static constexpr bool is_near = false;
  float of[4];
};
struct NearResults {
  static constexpr bool is_near = true;
  float of[4];
  bool is_far;
};

// Four elements in a function that is not inlined. `Places`: where in `values` the values are that it reads.
template <class Found, class Of, int... Places>
static __device__ __noinline__ Found four_apart(float acc0, float acc1, float acc2, float acc3,
                                                decltype(float(Places))... given) {
  const float accs[4] = {acc0, acc1, acc2, acc3};
  float values[4 * kSlots];
  ((values[Places] = given), ...);
  Found found;
  if constexpr (Found::is_near) found.is_far = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Found::is_near) {
      found.of[i] = Of::element(i, accs, values, found.is_far);
    } else {
      found.of[i] = Of::element(i, accs, values);
    }
  }
  return found;
}

// Four elements. `IsLong`: apart.
template <class Of, bool IsLong, int... Places>
struct Four {
  EPIGEMM_HOST_DEVICE static void apply(const float* accs, const float* values, float* results) {
    if constexpr (IsLong) {
      const auto found = four_apart<Results, Of, Places...>(accs[0], accs[1], accs[2], accs[3], values[Places]...);
#pragma unroll
      for (int i = 0; i < 4; ++i) results[i] = found.of[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) results[i] = Of::apply(accs[i], values + i * kSlots);
    }
  }
  EPIGEMM_HOST_DEVICE static void near_form(const float* accs, const float* values, float* results, bool& is_far) {
    if constexpr (!Of::has_far) {
      apply(accs, values, results);
    } else if constexpr (IsLong) {
      const auto found = four_apart<NearResults, Of, Places...>(accs[0], accs[1], accs[2], accs[3], values[Places]...);
#pragma unroll
      for (int i = 0; i < 4; ++i) results[i] = found.of[i];
      if (found.is_far) is_far = true;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) results[i] = Of::apply(accs[i], values + i * kSlots, is_far);
    }
  }
};

}  // namespace epigemm::open

#define EPIGEMM_DEFINE(T, name, parameters, value)                      \
  extern "C" __device__ T name parameters {                             \
    const T slots[] = {c0, c1, c2, c3, s0, s1, s2, s3, r0, r1, m0, m1}; \
    return value;                                                       \
  }
// `Of`: an Applied; `FourOf`: its Four; `Stored`: the second value's Applied, or Nothing.
#define EPIGEMM_DEFINE_APPLY(Of, FourOf, Stored)                                                          \
  EPIGEMM_DEFINE(float, epigemm_apply, (float acc, EPIGEMM_SLOTS(float)), Of::apply(acc, slots))          \
  EPIGEMM_DEFINE(float, epigemm_store, (float acc, EPIGEMM_SLOTS(float)), Stored::apply(acc, slots))      \
  extern "C" __device__ bool epigemm_has_store() { return Stored::exists; }                               \
  extern "C" __device__ void epigemm_apply_four(const float* accs, const float* values, float* results) { \
    FourOf::apply(accs, values, results);                                                                 \
  }
// Beside it for kernels with 16-bit results.
#define EPIGEMM_DEFINE_NEAR(Of, FourOf, Stored)                                                              \
  EPIGEMM_DEFINE(float, epigemm_apply_near, (float acc, EPIGEMM_SLOTS(float), bool& is_far),                 \
                 Of::near_form(acc, slots, is_far))                                                          \
  EPIGEMM_DEFINE(float, epigemm_store_near, (float acc, EPIGEMM_SLOTS(float), bool& is_far),                 \
                 Stored::near_form(acc, slots, is_far))                                                      \
  extern "C" __device__ bool epigemm_has_far() { return Of::has_far; }                                       \
  extern "C" __device__ bool epigemm_has_far_store() { return Stored::has_far; }                             \
  extern "C" __device__ void epigemm_apply_near_four(const float* accs, const float* values, float* results, \
                                                     bool& is_far) {                                         \
    FourOf::near_form(accs, values, results, is_far);                                                        \
  }
#define EPIGEMM_DEFINE_DOUBLE(Of) \
  EPIGEMM_DEFINE(double, epigemm_apply_double, (double acc, EPIGEMM_SLOTS(double)), Of::apply(acc, slots))
#define EPIGEMM_DEFINE_SLOPE(T, name, Of) \
  EPIGEMM_DEFINE(T, name, (T acc, EPIGEMM_SLOTS(T), int slot), Of::slope(acc, slots, slot))
