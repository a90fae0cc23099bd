// The contract between a kernel whose epilogue is left open and the functor that is linked into it.
//
// An open kernel is compiled once, to LTO-IR. It calls `epigemm_apply`, which a functor defines, compiled to
// LTO-IR too: of a built-in epilogue with the package (functor.h), of a Python function by NVRTC. The linker
// (nvJitLink) inlines it. `epigemm_operand` folds to constants then: what a functor does not read is neither loaded nor
// given registers.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

namespace epigemm::link {

// What a functor may read beside the accumulator, one slot each.
constexpr int kColumns = 4, kScalars = 4, kRows = 2, kMatrices = 2;
constexpr int kColumn0 = 0, kScalar0 = kColumn0 + kColumns, kRow0 = kScalar0 + kScalars, kMatrix0 = kRow0 + kRows;
constexpr int kSlots = kMatrix0 + kMatrices;

// What `epigemm_operand` says of a slot.
constexpr int kUnread = 0;
constexpr int kOfElement = 1;  // x's element type
constexpr int kOfCompute = 2;  // fp32; fp64 where x is fp64

#if !defined(__CUDACC_RTC__)

// The operands of one call, a kernel's argument. Operands that the functor does not read may have any value.
template <class Compute>
struct Operands {
  const void* data[kSlots];           // contiguous vectors of N or M; scalars on the device, null = by value; matrices
  int64_t matrix_strides[kMatrices];  // elements from row to row
  Compute scalars[kScalars];          // by value
};

#endif

}  // namespace epigemm::link

#if defined(__CUDACC__)

// Which operands are read, and as what: see above.
extern "C" __device__ int epigemm_operand(int slot);

// The epilogue of one element: columns, scalars, rows, matrices.
extern "C" __device__ float epigemm_apply(float acc, float c0, float c1, float c2, float c3, float s0, float s1,
                                          float s2, float s3, float r0, float r1, float m0, float m1);
extern "C" __device__ double epigemm_apply_double(double acc, double c0, double c1, double c2, double c3, double s0,
                                                  double s1, double s2, double s3, double r0, double r1, double m0,
                                                  double m1);

// Its derivative by the operand in a slot, or by the accumulator (slot -1).
extern "C" __device__ float epigemm_slope(float acc, float c0, float c1, float c2, float c3, float s0, float s1,
                                          float s2, float s3, float r0, float r1, float m0, float m1, int slot);
extern "C" __device__ double epigemm_slope_double(double acc, double c0, double c1, double c2, double c3, double s0,
                                                  double s1, double s2, double s3, double r0, double r1, double m0,
                                                  double m1, int slot);

#endif
