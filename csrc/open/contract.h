// The contract between a kernel whose epilogue is left open and the functor that is linked into it.
//
// An open kernel is compiled once, to LTO-IR. It calls `epigemm_apply`, which a functor defines, compiled to
// LTO-IR too: with the package, or by NVRTC (functor.h; epigemm/epilogues/tracer/source.py writes its text). The linker
// (nvJitLink) inlines it. `epigemm_operand` folds to constants then: what a functor does not read is neither loaded nor
// given registers.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

#include "epilogue/operands.h"
#include "epilogue/warp.h"

namespace epigemm::open {

// Each operand that a functor may read, beside the accumulator, has a slot. The slots of a kind are consecutive, in the
// order of the kinds.
EPIGEMM_HOST_DEVICE constexpr int first_slot(OperandKind kind) {
  int slot = 0;
  for (int before = 1; before < static_cast<int>(kind); ++before) {
    slot += traits_of(static_cast<OperandKind>(before)).most;
  }
  return slot;
}

constexpr int kColumns = traits_of(OperandKind::PerColumn).most, kColumn0 = first_slot(OperandKind::PerColumn);
constexpr int kScalars = traits_of(OperandKind::Scalar).most, kScalar0 = first_slot(OperandKind::Scalar);
constexpr int kRows = traits_of(OperandKind::PerRow).most, kRow0 = first_slot(OperandKind::PerRow);
constexpr int kMatrices = traits_of(OperandKind::Matrix).most, kMatrix0 = first_slot(OperandKind::Matrix);
constexpr int kSlots = first_slot(static_cast<OperandKind>(kOperandKinds));

// Results of `epigemm_operand`: how a slot is read.
constexpr int kUnread = 0;
constexpr int kOfElement = 1;  // x's element type
constexpr int kOfCompute = 2;  // fp32; fp64 where x is fp64

#if !defined(__CUDACC_RTC__)

// From a row of the result to the row of a matrix that shares rows: row / count, where `count` consecutive rows of the
// result read one. The quotient is exact for rows below 2^31, by Granlund and Montgomery's "Division by invariant
// integers using multiplication" (PLDI 1994): multiplier = ceil(2^(31 + shift) / count) with 2^shift >= count.
struct SharedRows {
  uint32_t multiplier, shift;  // 0, 0: the matrix shares no rows

  // `count`: from 1 to 2^31 - 1.
  static SharedRows by(int64_t count) {
    uint32_t shift = 0;
    while (int64_t{1} << shift < count) ++shift;
    return {static_cast<uint32_t>(((int64_t{1} << (31 + shift)) + count - 1) / count), shift};
  }
  EPIGEMM_HOST_DEVICE int64_t of(int64_t row) const {
    const uint64_t twice = static_cast<uint32_t>(row) * 2u;
    return static_cast<uint32_t>(twice * multiplier >> 32) >> shift;
  }
};

// The operands of one call, a kernel's argument. Operands that the functor does not read may have any value.
template <class Compute>
struct Operands {
  const void* data[kSlots];           // contiguous vectors of N or M; scalars on the device, null = by value; matrices
  int64_t matrix_strides[kMatrices];  // elements from row to row
  SharedRows shared_rows[kMatrices];
  Compute scalars[kScalars];  // by value
};

#endif

}  // namespace epigemm::open

// The operands' values by slot: parameters of the functions below, which functor.h defines.
#define EPIGEMM_SLOTS(T) T c0, T c1, T c2, T c3, T s0, T s1, T s2, T s3, T r0, T r1, T m0, T m1

#if defined(__CUDACC__)

// Whether a slot's operand is read, and with which type: see above.
extern "C" __device__ int epigemm_operand(int slot);

// Whether a slot's matrix shares rows (SharedRows). A constant too, so kernels of other functors have no code for it.
extern "C" __device__ bool epigemm_shares_rows(int slot);

// The epilogue of one element.
extern "C" __device__ float epigemm_apply(float acc, EPIGEMM_SLOTS(float));
extern "C" __device__ double epigemm_apply_double(double acc, EPIGEMM_SLOTS(double));

// The near form of a functor, called by kernels with 16-bit results. Some short functions take more instructions where
// an argument or a quotient is large, and a branch to these in each element would keep a thread's elements from being
// computed side by side. The near form has no such branch. It sets `is_far` to true if its result is wrong because of
// that, and leaves `is_far` unchanged otherwise. A kernel computes several elements by it, and if `is_far` is true
// in any thread of the warp, computes them again by epigemm_apply. `epigemm_has_far`: whether the functor ever sets
// `is_far`. If not, its near form is epigemm_apply.
extern "C" __device__ float epigemm_apply_near(float acc, EPIGEMM_SLOTS(float), bool& is_far);
extern "C" __device__ bool epigemm_has_far();

// The functor of four elements, in both forms: element 2 r + c of row r and column c, for two rows and two columns of
// D. `values`: kSlots of them for each element. A long functor computes the four in a function that is not inlined: a
// kernel that applies it to each of a thread's 128 or 192 sums by its own code does not fit into the instruction cache,
// and one that calls it for one element after another waits for each.
extern "C" __device__ void epigemm_apply_four(const float* accs, const float* values, float* results);
extern "C" __device__ void epigemm_apply_near_four(const float* accs, const float* values, float* results,
                                                   bool& is_far);

// A functor may have a second value for each element, which its kernel stores in a matrix beside the result's: whether
// it has one; the value; and its near form, with the same meaning as above. Both values are functions of the same
// operands, so `epigemm_operand` names those that either of them reads. Only the families of Family::stores call these
// functions, and no other is chosen for such a functor.
extern "C" __device__ bool epigemm_has_store();
extern "C" __device__ float epigemm_store(float acc, EPIGEMM_SLOTS(float));
extern "C" __device__ float epigemm_store_near(float acc, EPIGEMM_SLOTS(float), bool& is_far);
extern "C" __device__ bool epigemm_has_far_store();

// The epilogue's derivative by the operand in a slot, or by the accumulator (slot -1).
extern "C" __device__ float epigemm_slope(float acc, EPIGEMM_SLOTS(float), int slot);
extern "C" __device__ double epigemm_slope_double(double acc, EPIGEMM_SLOTS(double), int slot);

#endif
