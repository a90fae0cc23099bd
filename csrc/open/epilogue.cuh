// How a plain CUDA kernel calls its functor, and reads its operands. The functor is the one that is linked into it, or
// one of its own (elementwise/functor.cuh). Every load depends on what the functor says of a slot, so the loads of
// slots that it does not read are dropped.
#pragma once

#include "device/types.cuh"
#include "open/contract.h"

namespace epigemm::open {

// Values by slot.
__device__ __forceinline__ float apply(float acc, const float (&v)[kSlots]) {
  return epigemm_apply(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11]);
}
__device__ __forceinline__ double apply(double acc, const double (&v)[kSlots]) {
  return epigemm_apply_double(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11]);
}
__device__ __forceinline__ float slope(float acc, const float (&v)[kSlots], int slot) {
  return epigemm_slope(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], slot);
}
__device__ __forceinline__ double slope(double acc, const double (&v)[kSlots], int slot) {
  return epigemm_slope_double(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], slot);
}

static_assert(kSlots == 12, "the calls above name every slot");

// Four elements, in the order of epigemm_apply_four.
struct Four {
  float accs[4], values[4 * kSlots];

  __device__ __forceinline__ void set(int i, float acc, const float (&v)[kSlots]) {
    accs[i] = acc;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) values[i * kSlots + slot] = v[slot];
  }
};

// The functor's values for an element, the result and the second one: each in both forms, of one element and of four,
// and whether the near form is another one.
struct Result {
  template <class T>
  __device__ __forceinline__ static T of(T acc, const T (&v)[kSlots]) {
    return apply(acc, v);
  }
  __device__ __forceinline__ static float near(float acc, const float (&v)[kSlots], bool& is_far) {
    return epigemm_apply_near(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], is_far);
  }
  __device__ __forceinline__ static void of_four(const Four& four, float (&results)[4]) {
    epigemm_apply_four(four.accs, four.values, results);
  }
  __device__ __forceinline__ static void near_of_four(const Four& four, float (&results)[4], bool& is_far) {
    epigemm_apply_near_four(four.accs, four.values, results, is_far);
  }
  __device__ __forceinline__ static bool has_far() { return epigemm_has_far(); }
};

struct Stored {
  __device__ __forceinline__ static float of(float acc, const float (&v)[kSlots]) {
    return epigemm_store(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11]);
  }
  __device__ __forceinline__ static float near(float acc, const float (&v)[kSlots], bool& is_far) {
    return epigemm_store_near(acc, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], is_far);
  }
  __device__ __forceinline__ static void of_four(const Four& four, float (&results)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const v = four.values + i * kSlots;
      results[i] =
          epigemm_store(four.accs[i], v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11]);
    }
  }
  __device__ __forceinline__ static void near_of_four(const Four& four, float (&results)[4], bool& is_far) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const v = four.values + i * kSlots;
      results[i] = epigemm_store_near(four.accs[i], v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10],
                                      v[11], is_far);
    }
  }
  __device__ __forceinline__ static bool has_far() { return epigemm_has_far_store(); }
};

// The functor that is linked in.
struct Linked {
  using Result = open::Result;
  static constexpr bool kHasWideAccumulator = true;  // its derivative may have one of the compute type, and give such

  __device__ __forceinline__ static int operand(int slot) { return epigemm_operand(slot); }
  __device__ __forceinline__ static bool shares_rows(int slot) { return epigemm_shares_rows(slot); }
  // Whether a kernel of derivatives also gives that by the operand in a slot.
  __device__ __forceinline__ static bool is_derived(int slot) { return operand(slot) != kUnread; }

  // grad times the derivative by a slot's operand, or by the accumulator (slot -1). Where that derivative is 0 the
  // result is 0 even if grad is infinite or NaN, as in torch's own derivatives.
  template <class T>
  __device__ __forceinline__ static T derivative(T grad, T acc, const T (&v)[kSlots], int slot) {
    const T found = slope(acc, v, slot);
    return found == T(0) ? T(0) : grad * found;
  }
};

// Whether kWidth neighbours are known to be within the row, at an address that allows wide loads.
enum class Access { Wide, Unknown };

// kWidth neighbours of a row as one access of memory, or two.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Packed {
  T values[kWidth];

  __device__ __forceinline__ auto at(int i) const {
    if constexpr (kWidth > 1) {
      typename cuda::ComputeType<T>::type pair[2];
      cuda::to_compute_pair(values + i / 2 * 2, pair);
      return pair[i % 2];
    } else {
      return cuda::to_compute(values[i]);
    }
  }
};

// `count` of them exist; the others are read from the row's last element.
template <Access access, class T, int kWidth>
__device__ __forceinline__ void load(Packed<T, kWidth>& to, const void* data, int64_t index, int64_t count) {
  const T* const from = static_cast<const T*>(data) + index;
  if constexpr (access == Access::Wide || kWidth == 1) {
    to = *reinterpret_cast<const Packed<T, kWidth>*>(from);
  } else if (count >= kWidth && reinterpret_cast<uintptr_t>(from) % alignof(Packed<T, kWidth>) == 0) {
    to = *reinterpret_cast<const Packed<T, kWidth>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to.values[i] = from[i < count ? i : count - 1];
  }
}

// Columns of a matrix whose rows are taken as one: how many a row has, at least kWidth and less than 2^31, and the
// place of the first one in its row. `count` 0: the rows are taken one by one.
struct Wrapped {
  uint32_t count = 0, first = 0;
};

// Neighbours of x's element type or of the compute type, unconverted. They are converted where they are used, so that
// no load waits for the one before it. `kind`: the result of epigemm_operand.
template <class Element, int kWidth>
class Neighbours {
 public:
  using Compute = typename cuda::ComputeType<Element>::type;

  template <Access access>
  __device__ __forceinline__ void load(int kind, const void* data, int64_t index, int64_t count) {
    if (kind == kOfElement) open::load<access>(of_element_, data, index, count);
    if (kind == kOfCompute) open::load<access>(of_compute_, data, index, count);
  }

  // From a vector that begins again behind its last element.
  __device__ __forceinline__ void load_wrapped(int kind, const void* data, Wrapped wrapped) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t next = wrapped.first + i, at = next < wrapped.count ? next : next - wrapped.count;
      if (kind == kOfElement) of_element_.values[i] = static_cast<const Element*>(data)[at];
      if (kind == kOfCompute) of_compute_.values[i] = static_cast<const Compute*>(data)[at];
    }
  }

  // Zeros, or -0 everywhere. Elements of 16 bits are written in pairs, as they are read: one by one, bf16 would lie in
  // local memory.
  __device__ __forceinline__ void clear(bool is_negative) {
    of_element_ = {};
    of_compute_ = {};
    if (!is_negative) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) of_compute_.values[i] = Compute(-0.0);
    if constexpr (sizeof(Element) == 2 && kWidth > 1) {
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) reinterpret_cast<uint32_t*>(of_element_.values)[i] = 0x80008000u;
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) of_element_.values[i] = cuda::from_compute<Element>(Compute(-0.0));
    }
  }

  __device__ __forceinline__ Compute at(int kind, int i) const {
    return kind == kOfElement ? of_element_.at(i) : kind == kOfCompute ? of_compute_.at(i) : Compute(0);
  }

 private:
  Packed<Element, kWidth> of_element_;
  Packed<Compute, kWidth> of_compute_;
};

// The functor for kWidth neighbouring columns. Operands that are the same in all rows are loaded once.
template <class Element, int kWidth, Access access, class Functor = Linked>
class Epilogue {
 public:
  using Compute = typename cuda::ComputeType<Element>::type;
  using Operands = open::Operands<Compute>;

  // The operands of one row of these columns.
  struct Row {
    Neighbours<Element, 1> rows[kRows];
    Neighbours<Element, kWidth> matrices[kMatrices];
  };

  // `is_absent_negative`: an absent vector is read as -0, else as zeros.
  __device__ __forceinline__ Epilogue(const Operands& operands, int64_t column, int64_t columns, Wrapped wrapped = {},
                                      bool is_absent_negative = false)
      : operands_(operands), column_(column), count_(columns - column) {
#pragma unroll
    for (int i = 0; i < kScalars; ++i) {
      if (Functor::operand(kScalar0 + i) == kUnread) continue;
      const auto* const data = static_cast<const Compute*>(operands.data[kScalar0 + i]);
      scalars_[i] = data ? *data : operands.scalars[i];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const void* const data = operands.data[kColumn0 + i];
      const int kind = Functor::operand(kColumn0 + i);
      columns_[i].clear(is_absent_negative);
      if (!data) continue;
      if (wrapped.count > 0) {
        columns_[i].load_wrapped(kind, data, wrapped);
      } else {
        columns_[i].template load<access>(kind, data, column, count_);
      }
    }
  }

  // Starts the loads of a row.
  __device__ __forceinline__ Row row(int64_t row) const {
    Row loaded;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const void* const data = operands_.data[kRow0 + i];
      loaded.rows[i].template load<access>(Functor::operand(kRow0 + i), data, row, 1);
    }
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      const void* const data = operands_.data[kMatrix0 + i];
      loaded.matrices[i].template load<access>(Functor::operand(kMatrix0 + i), data, place(i, row), count_);
    }
    return loaded;
  }

  // Brings a row's part of the matrices from memory to L2.
  __device__ __forceinline__ void prefetch(int64_t row) const {
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      const int kind = Functor::operand(kMatrix0 + i);
      if (kind == kUnread) continue;
      const int bytes = static_cast<int>(kind == kOfElement ? sizeof(Element) : sizeof(Compute));
      const char* const from = static_cast<const char*>(operands_.data[kMatrix0 + i]) + place(i, row) * bytes;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }

  // The functor of one element.
  template <class Value = typename Functor::Result>
  __device__ __forceinline__ Compute apply(Compute acc, const Row& row, int i) const {
    Compute values[kSlots];
    gather(row, i, values);
    return Value::of(acc, values);
  }

  // Its second value.
  __device__ __forceinline__ Compute stored(Compute acc, const Row& row, int i) const {
    return apply<Stored>(acc, row, i);
  }

  // The functor of all columns; of 16-bit results first in its near form (contract.h). Threads without columns in the
  // matrix do not call it, so the vote is that of the active ones.
  template <class Value = typename Functor::Result>
  __device__ __forceinline__ void apply(const Compute (&accs)[kWidth], const Row& row,
                                        Compute (&results)[kWidth]) const {
    if constexpr (sizeof(Element) == 2) {
      bool is_far = false;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        Compute values[kSlots];
        gather(row, i, values);
        results[i] = Value::near(accs[i], values, is_far);
      }
      if (Value::has_far() && any_of_warp(is_far)) apply_again<Value>(accs, row, results);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) results[i] = apply<Value>(accs[i], row, i);
    }
  }

  // grad times its derivative by the operand in a slot, or by the accumulator (slot -1).
  __device__ __forceinline__ Compute derivative(Compute grad, Compute acc, const Row& row, int i, int slot) const {
    Compute values[kSlots];
    gather(row, i, values);
    return Functor::derivative(grad, acc, values, slot);
  }

 private:
  // The functor of all columns. This runs seldom, so its code is short: it computes one element at a time.
  template <class Value>
  __device__ __forceinline__ void apply_again(const Compute (&accs)[kWidth], const Row& row,
                                              Compute (&results)[kWidth]) const {
#pragma unroll 1
    for (int which = 0; which < kWidth; ++which) {
      Compute acc = 0, values[kSlots] = {};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (i != which) continue;
        acc = accs[i];
        gather(row, i, values);
      }
      const Compute result = Value::of(acc, values);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) results[i] = i == which ? result : results[i];
    }
  }

  __device__ __forceinline__ int64_t place(int matrix, int64_t row) const {
    if (Functor::shares_rows(kMatrix0 + matrix)) row = operands_.shared_rows[matrix].of(row);
    return row * operands_.matrix_strides[matrix] + column_;
  }

  __device__ __forceinline__ void gather(const Row& row, int column, Compute (&values)[kSlots]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[kColumn0 + i] = columns_[i].at(Functor::operand(kColumn0 + i), column);
#pragma unroll
    for (int i = 0; i < kScalars; ++i) {
      values[kScalar0 + i] = Functor::operand(kScalar0 + i) == kUnread ? Compute(0) : scalars_[i];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[kRow0 + i] = row.rows[i].at(Functor::operand(kRow0 + i), 0);
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      values[kMatrix0 + i] = row.matrices[i].at(Functor::operand(kMatrix0 + i), column);
    }
  }

  const Operands& operands_;
  int64_t column_, count_;  // the first column, and how many there are from it on
  Compute scalars_[kScalars];
  Neighbours<Element, kWidth> columns_[kColumns];
};

}  // namespace epigemm::open
