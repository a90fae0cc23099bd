// The open elementwise kernels: every thread computes one vector of a row, and of 16-bit elements also the one below it
// in the next row.
#pragma once

#include <type_traits>

#include "elementwise/open_tiling.h"
#include "open/epilogue.cuh"

namespace epigemm::cuda {

// The element types of a unit.
namespace element {
using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float32 = float;
using float64 = double;
}  // namespace element

template <class Element>
constexpr int kOpenWidth = kOpenBytes / static_cast<int>(sizeof(Element));

// A second row in flight, and columns that are loaded once for both: see kRows in kernel.cuh.
template <class Element>
constexpr int kOpenRows = sizeof(Element) == 2 ? 2 : 1;

// The matrix, as every open kernel receives it.
struct OpenFrame {
  int64_t m, n;
  int64_t period;  // the columns of the matrix, if its rows are taken as one row; else 0
  uint32_t blocks_across;
  bool is_wide;  // every row of every matrix, and every vector of columns, begins at a multiple of kOpenBytes
};

template <class Element>
struct OpenElementwiseArguments {
  OpenFrame frame;
  const void* x;
  void* out;
  int64_t x_row_stride, out_row_stride;
  open::Operands<typename ComputeType<Element>::type> operands;
};

template <class Element>
struct OpenDerivativeArguments {
  OpenFrame frame;
  const void *grad, *acc;
  int64_t grad_row_stride, acc_row_stride;
  bool is_acc_of_compute;
  void* out[1 + open::kSlots];  // of the accumulator, then by slot; null = not wanted
  bool is_out_of_compute[1 + open::kSlots];
  open::Operands<typename ComputeType<Element>::type> operands;
};

// Calls body(width, row, column) for a thread's part: once for a whole vector, else for every element.
template <int kWidth, int kRows, class Body>
__device__ __forceinline__ void for_thread_part(const OpenFrame& frame, Body body) {
  const int width = frame.is_wide ? kWidth : 1;
  const OpenPlace place =
      open_place(blockIdx.x, frame.blocks_across, threadIdx.x, threadIdx.y, blockDim.x, blockDim.y, width, kRows);
  if (place.row >= frame.m || place.column >= frame.n) return;
  if (frame.is_wide && place.column + kWidth <= frame.n) {
    return body(std::integral_constant<int, kWidth>{}, place.row, place.column);
  }
  const int64_t end = place.column + width < frame.n ? place.column + width : frame.n;
#pragma unroll 1
  for (int64_t column = place.column; column < end; ++column) body(std::integral_constant<int, 1>{}, place.row, column);
}

// --- values ---------------------------------------------------------------------------------------------------------

template <class Element, int kWidth>
__device__ __forceinline__ void store(void* data, int64_t index,
                                      const typename ComputeType<Element>::type (&values)[kWidth]) {
  open::Packed<Element, kWidth> packed;
  if constexpr (kWidth > 1) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) from_compute_pair<Element>(values + i, packed.values + i);
  } else {
    packed.values[0] = from_compute<Element>(values[0]);
  }
  *reinterpret_cast<open::Packed<Element, kWidth>*>(static_cast<Element*>(data) + index) = packed;
}

// --- D = epilogue(x) ------------------------------------------------------------------------------------------------

template <class Element, int kWidth>
__device__ __forceinline__ void apply_part(const OpenElementwiseArguments<Element>& p, int64_t row, int64_t column) {
  using Epilogue = open::Epilogue<Element, kWidth, open::Access::Wide>;
  constexpr int kRows = kOpenRows<Element>;
  const int count = p.frame.m - row < kRows ? static_cast<int>(p.frame.m - row) : kRows;
  open::Packed<Element, kWidth> x[kRows];
  typename Epilogue::Row of_rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) open::load<open::Access::Wide>(x[r], p.x, (row + r) * p.x_row_stride + column, kWidth);
  }
  const Epilogue epilogue(p.operands, column, p.frame.n, p.frame.period, /*is_absent_negative=*/sizeof(Element) == 2);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) of_rows[r] = epilogue.row(row + r);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    typename Epilogue::Compute values[kWidth], results[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = x[r].at(i);
    epilogue.apply(values, of_rows[r], results);
    store<Element, kWidth>(p.out, (row + r) * p.out_row_stride + column, results);
  }
}

template <class Element>
__device__ __forceinline__ void run_elementwise(const OpenElementwiseArguments<Element>& p) {
  for_thread_part<kOpenWidth<Element>, kOpenRows<Element>>(p.frame, [&](auto width, int64_t row, int64_t column) {
    apply_part<Element, decltype(width)::value>(p, row, column);
  });
}

// --- derivatives ----------------------------------------------------------------------------------------------------

// Where the epilogue's derivative is 0 the result is 0 even if grad is infinite or NaN, as in torch's own derivatives.
template <class Compute>
__device__ __forceinline__ Compute times_slope(Compute grad, Compute slope) {
  return slope == Compute(0) ? Compute(0) : grad * slope;
}

template <class Element, int kWidth>
__device__ __forceinline__ void differentiate_part(const OpenDerivativeArguments<Element>& p, int64_t row,
                                                   int64_t column) {
  using Epilogue = open::Epilogue<Element, kWidth, open::Access::Wide>;
  using Compute = typename Epilogue::Compute;
  open::Packed<Element, kWidth> grad;
  open::load<open::Access::Wide>(grad, p.grad, row * p.grad_row_stride + column, kWidth);
  open::Neighbours<Element, kWidth> acc;
  const int kind = p.is_acc_of_compute ? open::kOfCompute : open::kOfElement;
  acc.template load<open::Access::Wide>(kind, p.acc, row * p.acc_row_stride + column, kWidth);
  const Epilogue epilogue(p.operands, column, p.frame.n, p.frame.period);
  const typename Epilogue::Row of_row = epilogue.row(row);
#pragma unroll
  for (int slot = -1; slot < open::kSlots; ++slot) {
    if (slot >= 0 && epigemm_operand(slot) == open::kUnread) continue;
    if (!p.out[1 + slot]) continue;
    Compute results[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      results[i] = times_slope(grad.at(i), epilogue.slope(acc.at(kind, i), of_row, i, slot));
    }
    const int64_t index = row * p.frame.n + column;
    if (p.is_out_of_compute[1 + slot]) {
      store<Compute, kWidth>(p.out[1 + slot], index, results);
    } else {
      store<Element, kWidth>(p.out[1 + slot], index, results);
    }
  }
}

template <class Element>
__device__ __forceinline__ void run_derivative(const OpenDerivativeArguments<Element>& p) {
  for_thread_part<kOpenWidth<Element>, 1>(p.frame, [&](auto width, int64_t row, int64_t column) {
    differentiate_part<Element, decltype(width)::value>(p, row, column);
  });
}

}  // namespace epigemm::cuda
